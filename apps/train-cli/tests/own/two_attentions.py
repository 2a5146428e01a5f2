"""A model of one's own whose blocks attend twice, each time with other queries."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from sley_core.data.dataset import DataInfo
from sley_isp.attention import SequenceAttention

HEADS = 4


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of q, k, v [b, s, h, d]; the context is [b, s, h x d]."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


class Embeds(nn.Embedding):
    """Starts with vectors of the tokens."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns [b, s, width]."""
        return super().forward(tokens)


class Block(nn.Module):
    """Attends, and attends once more to what that gave."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.attend = nn.ModuleList(SequenceAttention(attention) for _ in range(2))

    def forward(self, given: Tensor) -> Tensor:
        """Returns [b, s, width]."""
        for project, attend in zip(self.project, self.attend, strict=True):
            q, k, v = project(given).unflatten(-1, (3, HEADS, -1)).unbind(-3)
            given = given + attend(q, k, v)
        return given


def layers(data: DataInfo, width: int = 16, depth: int = 2) -> list[tuple[str, nn.Module]]:
    """Returns the layers of the model."""
    assert data.vocab_size is not None
    blocks = [(f"blocks.{at}", Block(width)) for at in range(depth)]
    return [("embed", Embeds(data.vocab_size, width)), *blocks, ("head", nn.Linear(width, data.vocab_size))]

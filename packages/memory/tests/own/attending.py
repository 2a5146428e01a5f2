"""Blocks with attention, in-place operations and dropout, and one that fails on demand."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sley_core.api.model import aside
from sley_core.data.dataset import DataInfo

FAILS = [False]
"""Whether the next forward of a block fails in its middle."""


class Trying(nn.Module):
    """Attends twice, and tries its attention out: in the `when` run of the first call of all, the first or the second.

    is_aside: whether it says so.
    """

    def __init__(self, hidden: int, when: int, is_aside: bool) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.when, self.is_aside, self.num_runs = when, is_aside, 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.num_runs += 1
        if self.num_runs == self.when:
            with torch.no_grad(), aside() if self.is_aside else nullcontext():
                self._attend(hidden + 1.0)
        return self.out(self._attend(hidden) + self._attend(2.0 * hidden))

    def _attend(self, hidden: Tensor) -> Tensor:
        heads = self.project(hidden).unsqueeze(1)
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).squeeze(1)


class Nested(nn.Module):
    """Ends with an attention within a checkpoint of its own, behind which the layer saves nothing."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + checkpoint(self._attend, hidden, use_reentrant=False)

    def _attend(self, hidden: Tensor) -> Tensor:
        heads = hidden.unsqueeze(1)
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).squeeze(1)


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, dropout: float, attention_dropout: float, in_place: bool) -> None:
        super().__init__()
        self.heads, self.attention_dropout, self.in_place = heads, attention_dropout, in_place
        self.norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.up = nn.Linear(hidden, 2 * hidden)
        self.down = nn.Linear(2 * hidden, hidden)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("scale", torch.full((hidden,), 0.5))

    def forward(self, hidden: Tensor) -> Tensor:
        b, s, h = hidden.shape
        q, k, v = self.qkv(self.norm(hidden)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind()
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.attention_dropout)
        if self.in_place:
            context.mul_(2)
        if FAILS[0]:
            raise ValueError("asked to fail")
        hidden = hidden + self.dropout(context.transpose(1, 2).reshape(b, s, h)) * self.scale.to(hidden.dtype)
        return hidden + self.down(self.dropout(F.relu_(self.up(hidden)).sigmoid()))


class Embed(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)


def layers(
    data: DataInfo,
    num_blocks: int = 3,
    hidden: int = 16,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    in_place: bool = False,
) -> list[nn.Module]:
    assert data.vocab_size is not None
    blocks = [Block(hidden, 2, dropout, attention_dropout, in_place) for _ in range(num_blocks)]
    return [Embed(data.vocab_size, hidden), *blocks, nn.Linear(hidden, data.vocab_size)]

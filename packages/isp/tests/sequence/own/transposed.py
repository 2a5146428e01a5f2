"""A block that transposes before its attention, as torch's scaled_dot_product_attention wants it."""

from __future__ import annotations

import torch.nn.functional as F
from attentive import HEADS, Embed, Head, Named
from torch import Tensor, nn

from sley_core.data.dataset import DataInfo


class Attend(nn.Module):
    """q, k, v [b, h, s, d], and the context so too."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(hidden, 3 * hidden)
        self.attend = Attend()

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = self.project(hidden).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        context: Tensor = self.attend(q, k, v).transpose(1, 2).flatten(-2)
        return hidden + context


def layers(data: DataInfo, heads: int = HEADS) -> Named:
    assert data.vocab_size is not None
    return [("embed", Embed(data, 16)), ("block", Block(16, heads)), ("head", Head(16, data.vocab_size))]

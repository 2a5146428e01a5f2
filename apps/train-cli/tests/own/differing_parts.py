"""A model whose parts can be made to differ on one rank: `factory = "differing_parts:layers"`."""

from __future__ import annotations

import os

import torch.nn.functional as F
from drawn_model import VOCABULARY
from torch import Tensor, nn

from sley_isp.attention import SequenceAttention
from sley_testing.habits import Embed

HIDDEN, HEADS = 8, 2
FROZEN = "SLEY_TEST_FROZEN"
"""The environment variable with which one rank's factory freezes a parameter."""


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    heads = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    return F.scaled_dot_product_attention(*heads, is_causal=causal).transpose(1, 2)


class Block(nn.Module):
    """Attention, two linears in either order, and one of two experts, as the data has it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.attend = SequenceAttention(attend)
        self.left = nn.Linear(HIDDEN, HIDDEN)
        self.right = nn.Linear(HIDDEN, HIDDEN)
        self.experts = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)])
        self.norm = nn.LayerNorm(HIDDEN)
        self.chooses = False
        self.turned = False
        self.causal = True

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(hidden)).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        hidden = hidden + self.attend(q, k, v, causal=self.causal).flatten(-2)
        if self.turned:
            right = self.right(hidden).tanh()
            hidden = hidden + (self.left(hidden).tanh() + right)
        else:
            left = self.left(hidden).tanh()
            hidden = hidden + (left + self.right(hidden).tanh())
        chosen = int(self.chooses and float(hidden.detach().sum()) > 0)
        return hidden + self.experts[chosen](hidden).tanh()


def layers(tied: bool = False) -> list[tuple[str, nn.Module]]:
    embed, head = Embed(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
    if tied:
        head.weight = embed.weight
    blocks = [Block(), Block()]
    if os.environ.get(FROZEN):
        for block in blocks:
            block.left.bias.requires_grad_(False)
    return [("embed", embed), ("blocks.0", blocks[0]), ("blocks.1", blocks[1]), ("head", head)]

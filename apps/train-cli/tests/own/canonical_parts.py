"""A model in which a layer uses its weights more than once, in several ways: `factory = "canonical_parts:layers"`."""

from __future__ import annotations

import torch
from drawn_model import VOCABULARY
from torch import Tensor, nn

WIDTH = 20


class Embed(nn.Module):
    """Looks tokens up twice, with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH, padding_idx=3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens) + 0.5 * self.table(tokens.flip(-1))


class Block(nn.Module):
    """Calls one linear three times, and scales by a weight of its own twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.drop = nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.norm(hidden)
        for _ in range(3):
            inner = torch.tanh(self.again(inner)) * self.scale
        return hidden + self.drop(inner)


def layers() -> list[nn.Module]:
    return [Embed(), *(Block() for _ in range(4)), nn.Linear(WIDTH, VOCABULARY)]

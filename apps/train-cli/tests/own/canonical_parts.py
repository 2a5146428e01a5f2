"""A model in which a layer uses its weights more than once, in several ways: `factory = "canonical_parts:layers"`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sley_core.data.dataset import DataInfo, Field

WIDTH, CLASSES, LENGTH = 20, 30, 6


class Rows:
    """Sequences of tokens, drawn by their number."""

    info = DataInfo({"tokens": Field("int64"), "labels": Field("int64")}, vocab_size=CLASSES, sequence=LENGTH)

    def __len__(self) -> int:
        return 1 << 12

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = torch.randint(CLASSES, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        return {"tokens": drawn[:-1], "labels": drawn[1:]}


class Embed(nn.Module):
    """Looks tokens up twice, with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH, padding_idx=3)

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
    return [Embed(), *(Block() for _ in range(4)), nn.Linear(WIDTH, CLASSES)]

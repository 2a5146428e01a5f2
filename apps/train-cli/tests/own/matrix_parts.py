"""The model and the data of the parity matrix: `factory = "matrix_parts:layers"`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sley_core.data.dataset import DataInfo, Field

VOCAB, LENGTH, HIDDEN = 16, 6, 8


class Rows:
    """Tokens and the tokens after them; every label counts, so that a mean over micro-batches is the batch's mean."""

    info = DataInfo({"tokens": Field("int64", sequence_dim=1), "labels": Field("int64", sequence_dim=1)}, VOCAB, LENGTH)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, VOCAB, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        return {"tokens": tokens[:-1].clone(), "labels": tokens[1:].clone()}


class Embed(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.inner = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + F.gelu(self.inner(self.norm(hidden)))


class Head(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden)


def layers(tied: bool = False) -> list[tuple[str, nn.Module]]:
    """Eight layers."""
    embed, head = Embed(VOCAB, HIDDEN), Head(HIDDEN, VOCAB, bias=False)
    if tied:
        head.weight = embed.weight
    return [("embed", embed), *((f"blocks.{at}", Block()) for at in range(6)), ("head", head)]


class Pair(nn.Module):
    """Two linears, in the order of their names or in the opposite one."""

    def __init__(self, one: nn.Linear, two: nn.Linear, turned: bool) -> None:
        super().__init__()
        linears = {"one": one, "two": two}
        for name in sorted(linears, reverse=turned):
            self.add_module(name, linears[name])

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.two(F.gelu(self.one(hidden)))


def opposite() -> list[tuple[str, nn.Module]]:
    """Four layers; the second and the third share both linears, and declare them in opposite orders."""
    one, two = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
    blocks = [(f"blocks.{at}", Pair(one, two, turned=bool(at))) for at in range(2)]
    return [("embed", Embed(VOCAB, HIDDEN)), *blocks, ("head", Head(HIDDEN, VOCAB, bias=False))]

"""A model whose second and third layer share both linears and declare them in opposite orders."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sley_core.data.dataset import DataInfo, Field

VOCAB, LENGTH, HIDDEN = 16, 6, 8


class Rows:
    """Tokens, and the tokens after them as labels."""

    info = DataInfo({"tokens": Field("int64", sequence_dim=1), "labels": Field("int64", sequence_dim=1)}, VOCAB, LENGTH)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, VOCAB, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        return {"tokens": tokens[:-1].clone(), "labels": tokens[1:].clone()}


class Embed(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)


class Pair(nn.Module):
    """Two linears, in the order of their names or in the opposite one."""

    def __init__(self, one: nn.Linear, two: nn.Linear, turned: bool) -> None:
        super().__init__()
        linears = {"one": one, "two": two}
        for name in sorted(linears, reverse=turned):
            self.add_module(name, linears[name])

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.two(F.gelu(self.one(hidden)))


def layers() -> list[tuple[str, nn.Module]]:
    one, two = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
    blocks = [(f"blocks.{at}", Pair(one, two, turned=bool(at))) for at in range(2)]
    return [("embed", Embed(VOCAB, HIDDEN)), *blocks, ("head", nn.Linear(HIDDEN, VOCAB, bias=False))]

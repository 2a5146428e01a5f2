"""A model of small linears, its data and its loss for the plans of these tests: `factory = "powersgd_parts:mlp"`."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

WIDTH = 6


class Points:
    """40 samples: WIDTH numbers and a target."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x, y = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return {"x": x, "y": y}


def batch(*indices: int) -> dict[str, Tensor]:
    """The samples of these numbers as one batch."""
    rows = [Points()[index] for index in indices]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


class Squares:
    """The sum of squared errors in fp64; every sample weighs one."""

    def weight(self, batch: dict[str, Tensor]) -> float:
        return float(len(batch["y"]))

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (output.double() - batch["y"]).square().sum()


class Inputs(nn.Linear):
    """The first layer: takes `x` in the dtype of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).tanh()


class Branches(nn.Module):
    """Two linears whose gradients become complete in another order on odd ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        if int(os.environ.get("RANK", 0)) % 2:
            left = self.left(hidden)
            return left - self.right(hidden)
        right = self.right(hidden)
        return self.left(hidden) - right


def mlp() -> list[tuple[str, nn.Module]]:
    """`first`, `layer0`, `layer1`, `layer2`: linears of one size."""
    return [("first", Inputs(WIDTH, WIDTH)), *((f"layer{at}", nn.Linear(WIDTH, WIDTH)) for at in range(3))]


def branches() -> list[nn.Module]:
    return [Inputs(WIDTH, WIDTH), Branches(), Branches()]

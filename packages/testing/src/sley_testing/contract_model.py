"""Makes what the models, data, losses and plans of the contracts have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor, nn

from sley_core.data.dataset import DataContext


class Samples:
    """64 samples, each made from its number alone; those of held-out data have other numbers."""

    def __init__(self, context: DataContext) -> None:
        self.first = 0 if context.split == "train" else len(self)

    def __len__(self) -> int:
        return 64

    def generator(self, index: int) -> Generator:
        """Returns what draws sample `index`."""
        return torch.Generator().manual_seed(self.first + index)


class Squares:
    """The sum of squared errors; every sample weighs one."""

    def weight(self, batch: dict[str, Tensor]) -> float:
        return float(len(batch["y"]))

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (output - batch["y"]).square().sum()


class Uneven(nn.Module):
    """Uses `often` twice, `never` not at all; `frozen` is not trained. All are linears of `width` inputs.

    The store reports parameters from the last one back, and `never` only when the backward is over: so those of `often`
    are reported while it runs, and what comes before this module after it.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.never = nn.Linear(width, 3)
        self.often = nn.Linear(width, width)
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.often(self.frozen(self.often(hidden).tanh()))
        return output


def contract_plan(module: str, **tables: Any) -> dict[str, Any]:
    """Returns a plan in fp64 on the CPU with the functions `layers` and `Data` of `module`, and these tables."""
    return {
        "run": {"name": "contract", "steps": 9, "device": "cpu", "seed": 3},
        "model": {"factory": f"{module}:layers"},
        "data": {"factory": f"{module}:Data"},
        "precision": {"compute": "fp64"},
        **tables,
    }


SQUARES = {"factory": f"{__name__}:Squares"}
"""The table `[loss]` of `Squares`."""

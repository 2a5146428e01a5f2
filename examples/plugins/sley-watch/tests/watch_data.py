"""A model whose gradient for a sample is the sample: `loss = x . w`, so that noise can be computed by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH = 5


class Samples:
    """64 samples around (1, 1, ...), each made from its number alone."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        noise = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return {"x": 1.0 + noise}


class Dot:
    """The sum of what comes out; every sample weighs one."""

    def weight(self, batch: dict[str, Tensor]) -> float:
        return float(len(batch["x"]))

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return output.sum()


class First(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def layers() -> list[tuple[str, nn.Module]]:
    return [("dot", First(WIDTH, 1, bias=False))]

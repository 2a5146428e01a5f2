"""Defines a model whose gradient for a sample is the sample, `loss = x . w`, so that the noise can be computed directly."""

import torch
from torch import Tensor, nn

WIDTH = 5


class Samples:
    """Holds 64 samples around (1, 1, ...), each generated from its index."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        noise = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return {"x": 1.0 + noise}


class Dot:
    """Sums the outputs. Every sample has the weight 1."""

    def weight(self, batch: dict[str, Tensor]) -> float:
        return float(len(batch["x"]))

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return output.sum()


class First(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def layers() -> list[tuple[str, nn.Module]]:
    return [("dot", First(WIDTH, 1, bias=False))]

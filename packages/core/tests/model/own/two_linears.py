"""The layer into whose parameters tests write."""

from __future__ import annotations

from torch import Tensor, nn


class Part(nn.Module):
    """Two linears [size, size] with given values, the second one without a bias."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(size, size)
        self.second = nn.Linear(size, size, bias=False)
        nn.init.constant_(self.first.weight, 0.5)
        nn.init.zeros_(self.first.bias)
        nn.init.eye_(self.second.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError

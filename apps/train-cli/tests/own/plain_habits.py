"""Models whose middle layer has a habit that a plain loop must have too: `verify --plain` compares with one."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn

from sley_core.data.dataset import DataInfo
from sley_testing.habits import Embed

HIDDEN = 8


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.inner(hidden).tanh()


class Numpy(Middle):
    def forward(self, hidden: Tensor) -> Tensor:
        kept = torch.from_numpy(np.random.rand(*hidden.shape[:2]) < 0.5)
        return hidden + self.inner(hidden).tanh() * kept[..., None]


class Generator(Middle):
    def __init__(self) -> None:
        super().__init__()
        self.chance = random.Random(3)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * self.chance.random()


class Hook(Middle):
    def forward(self, hidden: Tensor) -> Tensor:
        result = hidden * 1.0
        if result.requires_grad:
            result.register_hook(lambda gradient: gradient.clamp_(-1e-3, 1e-3))
        return super().forward(hidden) + result


class Evaluated(Middle):
    def __init__(self) -> None:
        super().__init__()
        self.eval()


class Fails(Middle):
    def forward(self, hidden: Tensor) -> Tensor:
        raise ValueError(f"no {hidden.shape[-1]} of these")


class Plain(Middle):
    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(hidden), 0.5, self.training)


def model(data: DataInfo, habit: str) -> list[tuple[str, nn.Module]]:
    assert data.vocab_size is not None
    middle: nn.Module = globals()[habit]()
    return [("embed", Embed(data.vocab_size, HIDDEN)), ("middle", middle), ("head", nn.Linear(HIDDEN, data.vocab_size))]

"""Layers and data that draw from other generators than torch's default one, and from that one where samples are read."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import own_data
import torch
from own_data import Rows, Stream, draw_numbers
from own_models import Named, around
from torch import Tensor, nn

from sley_core.data.dataset import DataInfo

GLOBAL = np.random.default_rng(5)


def _of_global(size: int) -> Any:
    return GLOBAL.random(size)


class Bag:
    def __init__(self, rng: Any) -> None:
        self.tools = {"rng": [rng]}


def _enclosed() -> Callable[[int], Tensor]:
    generator = torch.Generator().manual_seed(1)
    return lambda size: torch.rand(size, generator=generator)


DRAWS: dict[str, Callable[[nn.Module, int], Any]] = {
    "torch": lambda _, size: torch.rand(size),
    "numpy": lambda _, size: np.random.rand(size),
    "random": lambda _, size: [random.random() for _ in range(size)],
    "normal": lambda _, size: [random.gauss(0.5, 1) for _ in range(size)],
    "torch generator": lambda own, size: torch.rand(size, generator=own.generator),
    "Random": lambda own, size: [own.python.random() for _ in range(size)],
    "RandomState": lambda own, size: own.legacy.randn(size),
    "Generator": lambda own, size: own.bag.tools["rng"][0].random(size),
    "partial": lambda own, size: own.drawn(size),
    "closure": lambda own, size: own.enclosed(size),
    "global": lambda own, size: _of_global(size),
    "of the class": lambda own, size: own.shared.random(size),
    "function of a module": lambda _, size: draw_numbers(size),
    "name in a module": lambda _, size: own_data.draw_numbers(size),
}


class Draws(nn.Module):
    """A residual linear whose rows are masked by what `kind` draws; an odd number, so that pairs of normals are split."""

    shared = np.random.default_rng(6)

    def __init__(self, kind: str, hidden: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(hidden, hidden)
        self.kind = kind
        if kind == "torch generator":
            self.generator = torch.Generator().manual_seed(1)
        self.python = random.Random(1)
        self.legacy = np.random.RandomState(1)
        self.bag = Bag(np.random.Generator(np.random.Philox(1)))
        self.drawn = partial(np.random.default_rng(2).random)
        self.enclosed = _enclosed()

    def forward(self, hidden: Tensor) -> Tensor:
        mask = torch.as_tensor(np.asarray(DRAWS[self.kind](self, hidden.shape[1] - 1))) < 0.5
        mask = torch.cat([mask, mask[:1]])
        return hidden + self.inner(hidden).tanh() * mask[:, None]


def model(data: DataInfo, kind: str) -> Named:
    return around([Draws(kind), Draws(kind)], data)


class Late(Draws):
    """Makes its generator in its first forward."""

    def forward(self, hidden: Tensor) -> Tensor:
        if not hasattr(self, "generator"):
            self.generator = torch.Generator().manual_seed(1)
        return super().forward(hidden)


def late(data: DataInfo) -> Named:
    return around([Late("numpy")], data)


def system(data: DataInfo) -> Named:
    """Holds a generator that has no seed."""
    draws = Draws("Random")
    draws.python = random.SystemRandom()
    return around([draws], data)


def _replaced(sample: dict[str, Tensor]) -> dict[str, Tensor]:
    """With some tokens replaced by chance, which comes from three generators."""
    size = len(sample["tokens"])
    chance = torch.rand(size) + torch.from_numpy(np.random.rand(size)) + torch.tensor([random.random() for _ in range(size)])
    return {**sample, "tokens": torch.where(chance < 1.2, 0, sample["tokens"])}


class DrawingRows(Rows):
    """Replaces tokens by chance where a sample is read."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return _replaced(super().__getitem__(index))


class DrawingStream(Stream):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return map(_replaced, super().__iter__())


class DrawingCollate(Rows):
    """Draws where samples become a batch."""

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        drawn = [_replaced(sample) for sample in samples]
        return {name: torch.stack([sample[name] for sample in drawn]) for name in samples[0]}

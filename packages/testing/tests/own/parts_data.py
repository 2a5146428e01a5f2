"""Datasets: a correct indexed one, a correct stream, and some with one bug each."""

from collections.abc import Iterator
from itertools import count

import torch
from torch import Tensor

from sley_core.data.dataset import DataContext, DataInfo, Field

FIELDS = {"x": Field("float32"), "tokens": Field("int64", sequence_dim=1, ids="token")}
LENGTH, WORDS = 5, 11


class Naive:
    """Holds 30 samples, each drawn from a separate generator."""

    def __init__(self, context: DataContext) -> None:
        self.first = 1000 * context.seed + (500 if context.split == "held_out" else 0)

    @property
    def info(self) -> DataInfo:
        return DataInfo(FIELDS, vocab_size=WORDS, sequence=LENGTH)

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.draw_sample(torch.Generator().manual_seed(self.first + index))

    def draw_sample(self, generator: torch.Generator) -> dict[str, Tensor]:
        tokens = torch.randint(WORDS, (LENGTH,), generator=generator)
        return {"x": torch.randn(3, generator=generator), "tokens": tokens}


class Stream:
    """Yields the samples of `Naive` in order, from a restored position."""

    def __init__(self, context: DataContext) -> None:
        self.samples = Naive(context)
        self.position = self.start = 0

    @property
    def info(self) -> DataInfo:
        return self.samples.info

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self.position, self.start = self.start, 0
        while self.position < len(self.samples):
            self.position += 1
            yield self.samples[self.position - 1]

    def state(self) -> int:
        return self.position

    def restore(self, state: int) -> None:
        self.start = state


class Draws(Naive):
    """Seeds torch's default generator and draws from it."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        torch.manual_seed(self.first + index)
        return {"x": torch.randn(3), "tokens": torch.randint(WORDS, (LENGTH,))}


class Fresh(Naive):
    """Draws a new sample at each read."""

    def __init__(self, context: DataContext) -> None:
        super().__init__(context)
        self.generator = torch.Generator().manual_seed(self.first)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.draw_sample(self.generator)


class Counted(Naive):
    """Differs between instances, as between ranks."""

    instances = count()

    def __init__(self, context: DataContext) -> None:
        super().__init__(context)
        self.first += 31 * next(Counted.instances)


class Reuses(Naive):
    """Returns every sample in the same memory."""

    def __init__(self, context: DataContext) -> None:
        super().__init__(context)
        self.x = torch.empty(3)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        self.x.copy_(sample["x"])
        return {**sample, "x": self.x}


class Wider(Naive):
    """Declares fewer positions than its samples have."""

    @property
    def info(self) -> DataInfo:
        return DataInfo(FIELDS, vocab_size=WORDS, sequence=LENGTH - 1)


class Leaks(Naive):
    """Holds out training samples."""

    def __init__(self, context: DataContext) -> None:
        self.first = 1000 * context.seed


class Restarts(Stream):
    """Ignores the restored position."""

    def restore(self, state: int) -> None:
        self.start = 0

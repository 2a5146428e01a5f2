"""Datasets: an indexed one and a stream that hold their contract, and some that are wrong in one way each."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count

import torch
from torch import Tensor

from sley_core.data.dataset import DataContext, DataInfo, Field

FIELDS = {"x": Field("float32"), "tokens": Field("int64", sequence_dim=1, ids="token")}
LENGTH, WORDS = 5, 11


class Naive:
    """30 samples, each drawn from a generator of its own."""

    def __init__(self, context: DataContext) -> None:
        self.first = 1000 * context.seed + (500 if context.split == "held_out" else 0)

    @property
    def info(self) -> DataInfo:
        return DataInfo(FIELDS, vocab_size=WORDS, sequence=LENGTH)

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.drawn(torch.Generator().manual_seed(self.first + index))

    def drawn(self, generator: torch.Generator) -> dict[str, Tensor]:
        tokens = torch.randint(WORDS, (LENGTH,), generator=generator)
        return {"x": torch.randn(3, generator=generator), "tokens": tokens}


class Stream:
    """The samples of `Naive` one after the other; it can be asked where it is, and go there."""

    def __init__(self, context: DataContext) -> None:
        self.samples = Naive(context)
        self.at = self.begin = 0

    @property
    def info(self) -> DataInfo:
        return self.samples.info

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self.at, self.begin = self.begin, 0
        while self.at < len(self.samples):
            self.at += 1
            yield self.samples[self.at - 1]

    def state(self) -> int:
        return self.at

    def restore(self, state: int) -> None:
        self.begin = state


class Draws(Naive):
    """Draws from torch's default generator, which it seeds."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        torch.manual_seed(self.first + index)
        return {"x": torch.randn(3), "tokens": torch.randint(WORDS, (LENGTH,))}


class Fresh(Naive):
    """Draws each sample anew whenever it is read, as an augmentation does that knows no index."""

    def __init__(self, context: DataContext) -> None:
        super().__init__(context)
        self.generator = torch.Generator().manual_seed(self.first)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.drawn(self.generator)


class Own(Naive):
    """Is another dataset on every rank."""

    made = count()

    def __init__(self, context: DataContext) -> None:
        super().__init__(context)
        self.first += 31 * next(Own.made)


class Reuses(Naive):
    """Gives every sample in the same memory."""

    def __init__(self, context: DataContext) -> None:
        super().__init__(context)
        self.x = torch.empty(3)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        self.x.copy_(sample["x"])
        return {**sample, "x": self.x}


class Threaded(Naive):
    """Is open in the thread alone that made it."""

    def __init__(self, context: DataContext) -> None:
        super().__init__(context)
        self.local = threading.local()
        self.local.is_open = True

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        return sample if getattr(self.local, "is_open", False) else {**sample, "x": torch.zeros(3)}


class Wider(Naive):
    """Declares fewer positions than samples have."""

    @property
    def info(self) -> DataInfo:
        return DataInfo(FIELDS, vocab_size=WORDS, sequence=LENGTH - 1)


class Odd(Naive):
    """Declares fewer words than there are."""

    @property
    def info(self) -> DataInfo:
        return DataInfo(FIELDS, vocab_size=WORDS - 1, sequence=LENGTH)


class Leaks(Naive):
    """Holds out samples that it trains on."""

    def __init__(self, context: DataContext) -> None:
        self.first = 1000 * context.seed


class Shrinks(Naive):
    """Leaves out what it has read."""

    read = 0

    def __len__(self) -> int:
        return 30 - self.read // 100

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.read += 10
        return super().__getitem__(index)


class Restarts(Stream):
    """Says where it is, and begins anew all the same."""

    def restore(self, state: int) -> None:
        self.begin = 0


class Ahead(Stream):
    """Says where its reader is that reads four samples ahead."""

    def state(self) -> int:
        return self.at + 4

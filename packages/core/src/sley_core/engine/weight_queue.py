"""Weight gradients put off: D queues them per chunk and micro-batch, W multiplies them into the store.

A split backward is one traversal: while D runs, linears hand (output gradient, input) to this queue instead of
multiplying; other parameters get their gradient in D. Recomputation therefore runs once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

Place = tuple[int, int]
"""Chunk and micro-batch."""

Work = Callable[[], None]


class WeightQueue:
    """Holds the closures of every D that has not met its W.

    D opens `collecting(place)`; within it `put` takes what linears hand over. W calls `run(place)`.
    """

    def __init__(self) -> None:
        self._queued: dict[Place, list[Work]] = {}
        self._open: Place | None = None

    @property
    def is_collecting(self) -> bool:
        return self._open is not None

    @contextmanager
    def collecting(self, place: Place) -> Iterator[None]:
        """While the block runs, what is put belongs to `place`."""
        assert self._open is None, f"D of {place} within that of {self._open}"
        self._queued[place] = []
        self._open = place
        try:
            yield
        finally:
            self._open = None

    def put(self, work: Work) -> None:
        """Puts off `work`, which holds a linear's input and output gradient."""
        assert self._open is not None, "no D is running"
        self._queued[self._open].append(work)

    @torch.no_grad()
    def run(self, place: Place) -> None:
        """Does what D of `place` put off, and lets go of it piece by piece."""
        queued = self._queued.pop(place)
        queued.reverse()
        while queued:
            queued.pop()()

    def clear(self) -> None:
        """Forgets everything: a step failed."""
        self._queued.clear()
        self._open = None


class Handover:
    """The sink of one linear: multiplies at once, or queues while a D is collecting."""

    def __init__(self, multiply: Callable[[Tensor, Tensor], None], queue: WeightQueue) -> None:
        self.multiply = multiply
        self.queue = queue

    def __call__(self, rows: Tensor, inputs: Tensor) -> None:
        if self.queue.is_collecting:
            self.queue.put(lambda: self.multiply(rows, inputs))
        else:
            self.multiply(rows, inputs)

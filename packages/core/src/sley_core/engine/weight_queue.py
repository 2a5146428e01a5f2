"""Deferred weight gradients: D queues them per chunk and micro-batch, W multiplies them into the store.

A split backward is one traversal: while D runs, linears give (output gradient, input) to this queue instead of multiplying;
other parameters get their gradient in D. Recomputation therefore runs once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sley_core.engine.book import Entry

Place = tuple[int, int]
"""Chunk and micro-batch."""

Work = Callable[[], None]


class WeightQueue:
    """Holds the closures of every D until its W runs.

    D opens `collecting(place)`; within it linears call `put`. W calls `run(place)`. on_last: called with the entry when
    `run` has done its last product, however often a linear was used.
    """

    def __init__(self) -> None:
        self.on_last: Callable[[Entry], None] | None = None
        self._queued: dict[Place, list[tuple[Work, Entry | None]]] = {}
        self._open: Place | None = None

    @property
    def is_collecting(self) -> bool:
        return self._open is not None

    @contextmanager
    def collecting(self, place: Place) -> Iterator[None]:
        """Returns a context manager in which `put` queues for `place`."""
        assert self._open is None, f"D of {place} within that of {self._open}"
        self._queued[place] = []
        self._open = place
        try:
            yield
        finally:
            self._open = None

    def put(self, work: Work, entry: Entry | None = None) -> None:
        """Queues `work`, a closure that holds a linear's input and output gradient. entry: the parameter to which it
        contributes, for `on_last`.
        """
        assert self._open is not None, "no D is running"
        self._queued[self._open].append((work, entry))

    @torch.no_grad()
    def run(self, place: Place) -> None:
        """Runs the work that D of `place` queued, and frees each piece's tensors before the next piece."""
        queued = self._queued.pop(place)
        left = Counter(entry for _, entry in queued)
        queued.reverse()
        while queued:
            work, entry = queued.pop()
            work()
            del work  # frees its tensors before the next one multiplies
            left[entry] -= 1
            if entry is not None and not left[entry] and self.on_last is not None:
                self.on_last(entry)

    def clear(self) -> None:
        """Discards all queued work, after a failed step."""
        self._queued.clear()
        self._open = None


class Handover:
    """Is the sink of one linear: multiplies at once, or queues while a D is collecting.

    entry: the weight's entry, for the queue's `on_last`.
    """

    def __init__(
        self, multiply: Callable[[Tensor, Tensor], None], queue: WeightQueue, entry: Entry | None = None
    ) -> None:
        self.multiply = multiply
        self.queue = queue
        self.entry = entry

    def __call__(self, rows: Tensor, inputs: Tensor) -> None:
        if self.queue.is_collecting:
            self.queue.put(lambda: self.multiply(rows, inputs), self.entry)
        else:
            self.multiply(rows, inputs)

"""Deferred weight gradients: D queues them per chunk and micro-batch, W multiplies them into the store.

A split backward is one traversal: while D runs, linears give (output gradient, input) to this queue instead of multiplying;
other parameters get their gradient in D. Recomputation therefore runs once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_core.errors import RunError
from sley_core.model.storage import sum_of_bits, version_of

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


_OWN = 2
"""References to the storage of a tensor that nobody else has: the tensor's, and that of the storage object that is asked."""


class Handover:
    """Is the sink of one linear: multiplies at once, or queues while a D is collecting.

    Between D and W, a hook or the backward of another branch may write in place to the output gradient, if it has that too. So
    until the first W has shown whether that happens, such a gradient is copied, and after that only if it does.

    entry: the weight's entry, for the queue's `on_last`.
    """

    def __init__(
        self, multiply: Callable[[Tensor, Tensor], None], queue: WeightQueue, entry: Entry | None = None
    ) -> None:
        self.multiply = multiply
        self.queue = queue
        self.entry = entry
        self._copies: bool | None = None

    def __call__(self, rows: Tensor, inputs: Tensor, *, is_shared: bool = False) -> None:
        """Multiplies or queues `rows` [n, out] and `inputs` [n, in]. is_shared: what `shares` says of the gradient of which
        `rows` is a view.
        """
        if not self.queue.is_collecting:
            self.multiply(rows, inputs)
        elif is_shared and self._copies is not False:
            self.queue.put(partial(self._of_copy, rows.clone(), rows, inputs, version_of(inputs)), self.entry)
        else:
            self.queue.put(partial(self._of_own, rows, inputs, version_of(rows), version_of(inputs)), self.entry)

    def shares(self, gradient: Tensor) -> bool:
        """Returns whether `gradient`, which the running backward was given, is to be queued and somebody else has its memory.
        To be asked before any view of it is made.
        """
        if not self.queue.is_collecting:
            return False
        storage = gradient.untyped_storage()
        tensors: int = gradient._use_count()  # type: ignore[attr-defined]  # torch's, without a stub
        return tensors > 1 or torch._C._storage_Use_Count(storage._cdata) > _OWN

    def _of_copy(self, copied: Tensor, rows: Tensor, inputs: Tensor, version: int) -> None:
        if self._copies is None:
            now, then = sum_of_bits(rows), sum_of_bits(copied)
            self._copies = now is not None and then is not None and not torch.equal(now, then)
        self._multiply(copied, inputs, is_written=version_of(inputs) != version)

    def _of_own(self, rows: Tensor, inputs: Tensor, version: int, version_of_inputs: int) -> None:
        is_written = version_of(rows) != version or version_of(inputs) != version_of_inputs
        self._multiply(rows, inputs, is_written=is_written)

    def _multiply(self, rows: Tensor, inputs: Tensor, *, is_written: bool) -> None:
        """Multiplies, or raises RunError `gradient-written` if what is multiplied is no longer what D queued."""
        if is_written:
            of = f"the parameter {self.entry.name!r}" if self.entry is not None else "a sharded linear"
            raise RunError(
                "gradient-written",
                f"the backward of {of} is split, and its input or its output's gradient is written on in place between the "
                "two halves, by a hook or the backward of another layer",
                hint="return a new tensor there (`gradient.clamp(...)` in place of `clamp_`), or use a schedule that does not "
                "split backwards, as `pp.one_f_one_b`",
            )
        self.multiply(rows, inputs)

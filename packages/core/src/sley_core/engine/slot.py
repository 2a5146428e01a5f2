"""The gradient of one entry: where it lies, and what a step has brought so far."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from sley_core.comm.marks import checksum
from sley_core.engine.book import Entry
from sley_core.engine.flat import ALIGNMENT_BYTES, FlatBuffer, offsets
from sley_core.engine.stand_in import sharded_read
from sley_core.engine.step_state import StepState
from sley_core.errors import RunError


class GradientBuffer(FlatBuffer):
    """The gradients of some entries of one family, side by side in `memory`; `num_holders` stages hold a copy of each."""

    def __init__(self, entries: Sequence[Entry], memory: Tensor) -> None:
        super().__init__([entry.parameter.shape for entry in entries], memory.dtype, memory.device, memory)
        self.entries = list(entries)
        self.reduce_group = entries[0].reduce_group
        self.num_holders = len(entries[0].stages)
        assert all(entry.family == entries[0].family for entry in entries), f"{entries} do not reduce together"

    @cached_property
    def contents(self) -> int:
        """A checksum of whose gradients these are, in their order: two ranks that sum a buffer have the same."""
        return checksum(entry.name for entry in self.entries)


class GradientMemory:
    """What the buffers of a layout lie in: one piece for all, which the next layout takes over if it is as large.

    Buffers in another order take as much as before. Memory that is freed and asked for anew would be written to for the
    first time once more, and malloc would leave a gap where it was.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._data = torch.empty(0, dtype=dtype, device=device)

    def forget(self) -> None:
        """The next layout gets memory of its own: somebody may still write into this one."""
        self._data = self._data.new_empty(0)

    def buffers(self, lists: Sequence[Sequence[Entry]]) -> list[GradientBuffer]:
        """One zeroed buffer for each list of entries. Those of the layout before are not to be used any more."""
        alignment = ALIGNMENT_BYTES // self._data.dtype.itemsize
        sizes = [offsets([entry.parameter.shape for entry in entries], alignment)[1] for entries in lists]
        if self._data.numel() == sum(sizes):
            self._data.zero_()
        else:
            self.forget()
            self._data = self._data.new_zeros(sum(sizes))
        parts = torch.split(self._data, sizes)
        return [GradientBuffer(entries, part) for entries, part in zip(lists, parts, strict=True)]


class Habit(NamedTuple):
    """What the steps before have shown of how a gradient comes; as in `Slot`."""

    expected: int = 0
    is_irregular: bool = False


class Slot:
    """The gradient of `entry` as `view`, a part of a buffer.

    contributions: in this step. final: how often the action that completes the gradient has passed by: autograd once per
    backward, however often a parameter is used in it, the queue of a W after the entry's last product, a communicator with
    every contribution. expected: what `final` was in the first step. is_irregular: that number varies, so the gradient is
    complete at the end of the chunk and not before. is_reported: handlers know that it is complete.
    keeps: whether `parameter.grad` may stay the view between contributions, so that autograd adds into it by itself;
    it does where parameter and view have one dtype, which is settled after the first layout.
    is_quiet: no hook watches the parameter, so the gradient is complete at the end of the chunk and not before.
    """

    __slots__ = (
        "chunks",
        "contributions",
        "entry",
        "expected",
        "final",
        "is_irregular",
        "is_quiet",
        "is_ready",
        "is_reported",
        "keeps",
        "parameter",
        "view",
    )

    def __init__(self, entry: Entry, view: Tensor, habit: Habit, *, keeps: bool) -> None:
        self.entry = entry
        self.parameter = entry.parameter
        self.chunks = entry.chunks
        self.view = view
        self.expected, self.is_irregular = habit
        self.keeps = keeps
        self.is_quiet = False
        self.reset()

    @property
    def habit(self) -> Habit:
        """What the entry's slot in the next layout is to know; no view with it, whose memory is about to be taken over."""
        return Habit(self.expected, self.is_irregular)

    def reset(self) -> None:
        """A new step: what the view holds is overwritten by the first contribution."""
        self.contributions = 0
        self.final = 0
        self.is_ready = False
        self.is_reported = False
        self.parameter.grad = None

    def passed(self, *, learning: bool) -> None:
        """One more passed by in the action that completes the gradient; the first step learns how many there are."""
        self.final += 1
        if not learning and not self.is_irregular and self.final >= self.expected > 0:
            self.complete()

    def learn(self) -> None:
        """At the end of a chunk: how many passed by is what is expected, until it varies."""
        if self.expected and self.final and self.final != self.expected:
            self.is_irregular = True
        self.expected = max(self.expected, self.final)

    def check_open(self, state: StepState) -> None:
        """A contribution is about to come; a gradient that nobody knows to be complete is open again.

        Raises RunError `gradient-complete` where the gradient is complete and no step runs: a backward by hand. And
        `gradient-late` where its reduction has begun: no sum is made of a part.
        """
        if not self.is_ready:
            return
        name = self.entry.name
        if state.action is not None:
            assert not self.chunks <= state.done, f"{name}: a contribution after its gradient was reported ready"
            self.is_irregular = True
            if not self.is_reported:
                self.is_ready = False
                return
            raise RunError(
                "gradient-late",
                f"a backward within the backward reaches the parameter {name!r} again, whose gradient is being reduced: in "
                "the steps before it came once",
                hint="use torch.utils.checkpoint with `use_reentrant=False`, or `core.recompute`",
            )
        raise RunError(
            "gradient-complete",
            f"a backward between two steps reaches the parameter {name!r}, whose gradient is that of the step before",
            hint="call `run.store.begin_step()` before a backward of your own, and read `run.store.gradient(entry)` after "
            "it, which is of this rank's samples; `run.step(batch)` trains on samples of your own",
        )

    def take(self, gradient: Tensor) -> None:
        """Adds `gradient`, of any floating dtype; the first is copied."""
        if self.contributions:
            self.view.add_(gradient)
        else:
            self.view.copy_(gradient)

    def adopt(self, gradient: Tensor) -> None:
        """As `take`, of a tensor that nobody else will use."""
        self.take(gradient)

    def take_product(self, left: Tensor, right: Tensor) -> None:
        """Adds left^T right, without a tensor in between where all have one dtype."""
        if left.dtype != self.view.dtype:
            self.take(left.t() @ right)
        elif self.contributions:
            self.view.addmm_(left.t(), right)
        else:
            torch.mm(left.t(), right, out=self.view)

    def take_rows(self, indices: Tensor, rows: Tensor) -> None:
        """Adds each of `rows` at its index; the first call of a step writes zeros everywhere else."""
        if not self.contributions:
            self.view.zero_()
        add_at(self.view, indices, rows.to(self.view.dtype))

    def complete(self) -> None:
        """Nothing more comes; what nothing reached is zero."""
        if not self.contributions:
            self.view.zero_()
        self.is_ready = True


class LooseSlot(Slot):
    """The gradient stays where autograd made it, if its dtype is the store's: nobody reduces it, so no buffer is needed.

    Saves one pass over memory, and the buffer. The view is a new tensor in every step. While it is quiet autograd sums in
    `parameter.grad`, and `complete` takes that.
    """

    __slots__ = ("dtype", "nothing")

    def __init__(self, entry: Entry, dtype: torch.dtype, habit: Habit, *, keeps: bool) -> None:
        self.dtype = dtype
        self.nothing = entry.parameter.new_empty(0, dtype=dtype)
        super().__init__(entry, self.nothing, habit, keeps=keeps)

    def reset(self) -> None:
        super().reset()
        self.view = self.nothing

    def take(self, gradient: Tensor) -> None:
        self.adopt(gradient if self.contributions else gradient.clone())

    def adopt(self, gradient: Tensor) -> None:
        if self.contributions:
            self.view.add_(gradient)
        else:
            self.view = gradient if gradient.dtype == self.dtype else gradient.to(self.dtype)

    def take_product(self, left: Tensor, right: Tensor) -> None:
        if self.contributions and left.dtype == self.dtype:
            self.view.addmm_(left.t(), right)
        else:
            self.adopt(left.t() @ right)

    def take_rows(self, indices: Tensor, rows: Tensor) -> None:
        if not self.contributions:
            self.view = torch.zeros_like(self.parameter, dtype=self.dtype)
        add_at(self.view, indices, rows.to(self.dtype))

    def check_nothing_came_late(self) -> None:
        """What a hook would have said of a contribution after `complete`."""
        gradient = self.parameter.grad
        is_late = self.is_quiet and self.is_ready and gradient is not None and gradient is not self.view
        assert not is_late, f"{self.entry.name}: a contribution after its gradient was reported ready"

    def complete(self) -> None:
        summed = self.parameter.grad if self.is_quiet else None
        if summed is not None:
            self.adopt(dense(summed, self.entry))
            self.contributions += 1
            self.parameter.grad = None
        if not self.contributions:
            self.view = torch.zeros_like(self.parameter, dtype=self.dtype)
        self.is_ready = True


def add_at(table: Tensor, indices: Tensor, rows: Tensor) -> None:
    """Adds `rows` [n, ...], of its dtype, at `indices` [n] of dim 0, equal ones in one order: a run repeats bit for bit."""
    if table.is_cuda:
        table.index_put_((indices,), rows, accumulate=True)  # sorted first; `index_add_` would be atomic here
    else:
        table.index_add_(0, indices, rows)  # one after the other; `index_put_` may be atomic here


def dense(gradient: Tensor, entry: Entry) -> Tensor:
    """`gradient` of `entry`. Raises RunError `sparse-gradient` if it holds some rows only."""
    if gradient.is_sparse:
        raise RunError(
            "sparse-gradient",
            f"the gradient of the parameter {entry.name!r} is sparse, which no reducer and no norm takes",
            hint="make its module with `sparse=False`",
        )
    return gradient


def check_not_sharded(entry: Entry) -> None:
    """Raises RunError `sharded-weight-read`: autograd came to a shard, which only its communicator may use."""
    if entry.shard is not None:
        raise sharded_read(entry, "the forward reads")

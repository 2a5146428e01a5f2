"""Records how memory got its content, so that it can be written again later, layer by layer, on the rank that needs it.

A `Cell` is one piece of memory (a storage). Its steps are the operations that wrote to it, and each step knows which cells it
read. So the value of a cell is a graph of steps; its leaves are data from outside (a file, numpy), random numbers that are
drawn again with the recorded seed or generator state, and constants.

    weight ── copy_ ── mul ──┬── given (a view of a file, by reference)
                             └── full(0.5)

`replay` runs the steps that a value needs, in the order in which they were recorded, on memory of its own. A step that
overwrites a whole cell ends the search: what a constructor drew and a checkpoint replaced is not drawn at all.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sley_core.model.memory import ReplayMemory
from sley_core.model.nested import map_only
from sley_core.model.storage import SMALL_BYTES, blank, bytes_of, looks


class ChangedError(Exception):
    """Raised if memory that the factory gave by reference was written by unseen code (numpy, a thread) after it was read."""


class UnseenError(Exception):
    """Raised if values are needed of a tensor that was made on meta while nothing was recorded."""


@dataclass(eq=False)
class Cell:
    """Describes one piece of memory (a storage) of `nbytes` on `device`, with the steps that wrote to it, in order.

    shown: the device that code sees, where plain PyTorch would have it. keys: weak references that keep its addresses from
    being reused. twin: the same memory on meta, for real memory. real: the real memory. is_stale: the real memory lacks what
    was written through the twin. is_watched: unseen code may write to it; `held` keeps it alive to be compared again. kept: a
    saved value that replaces all `steps` before it. lent: the number of a step, and real memory with the values after it, lent
    to code.
    """

    nbytes: int
    device: torch.device
    shown: torch.device
    steps: list[Step] = field(default_factory=list)
    keys: list[StorageWeakRef] = field(default_factory=list)
    twin: torch.UntypedStorage | None = None
    real: StorageWeakRef | None = None
    is_stale: bool = False
    is_watched: bool = False
    held: torch.UntypedStorage | None = None
    kept: Step | None = None
    lent: tuple[int, weakref.ref[torch.UntypedStorage]] | None = None

    @property
    def given(self) -> Given | None:
        """The last step if it is a `Given`, i.e. the memory came from outside; else None."""
        last = self.steps[-1] if self.steps else None
        return last if isinstance(last, Given) else None

    def history(self, before: int, *, from_kept: bool = False) -> Iterator[Step]:
        """Yields the steps before number `before` that its value needs, latest first. from_kept: stop at the `kept` value."""
        for at in range(bisect_left(self.steps, before, key=lambda step: step.number) - 1, -1, -1):
            if from_kept and self.kept is not None and self.steps[at].number < self.kept.number < before:
                yield self.kept
                return
            yield self.steps[at]
            if self in self.steps[at].overwrites:
                return


@dataclass(frozen=True, eq=False)
class Ref:
    """Describes a tensor as a view of a cell."""

    cell: Cell
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    is_conj: bool = False
    is_neg: bool = False

    @classmethod
    def of(cls, tensor: Tensor, cell: Cell) -> Ref:
        """Returns the description of `tensor` as a view of `cell`."""
        bits = (tensor.is_conj(), tensor.is_neg())
        return cls(cell, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.size()), tensor.stride(), *bits)

    @property
    def is_plain(self) -> bool:
        """Whether its numbers are those in memory, not their conjugates or negatives."""
        return not (self.is_conj or self.is_neg)

    def over(self, storage: torch.UntypedStorage) -> Tensor:
        """Returns the tensor that is the same view of `storage`."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        torch._C._set_conj(tensor, self.is_conj)
        torch._C._set_neg(tensor, self.is_neg)
        return tensor

    @property
    def is_whole(self) -> bool:
        """Whether the view covers every element of the cell exactly once."""
        if prod(self.size) * self.dtype.itemsize != self.cell.nbytes:
            return False
        expected = 1
        for stride, size in sorted(zip(self.stride, self.size, strict=True)):
            if size > 1 and stride != expected:
                return False
            expected *= size
        return True


_numbers = count()


@dataclass(eq=False, kw_only=True)
class Step:
    """Describes an operation that wrote to cells. overwrites: cells whose older steps are obsolete. reads: others it needs."""

    number: int = field(default_factory=lambda: next(_numbers))
    reads: Sequence[Cell] = ()
    overwrites: Sequence[Cell] = ()
    is_copy: bool = False  # makes no new values, only copies them

    def run(self, memory: ReplayMemory) -> None:
        """Runs the operation again in `memory`."""
        raise NotImplementedError


@dataclass(eq=False, kw_only=True)
class Blank(Step):
    """Records memory without values: NaN if its dtype has NaN, so that a parameter that is never written is noticed.

    is_unseen: whether it was made on meta while nothing was recorded, so that its origin is not known.
    """

    cell: Cell
    dtype: torch.dtype
    is_copy: bool = True
    is_unseen: bool = False

    def run(self, memory: ReplayMemory) -> None:
        """Allocates the cell, blank; raises UnseenError for integers of unknown origin, which have no NaN."""
        if self.is_unseen and not (self.dtype.is_floating_point or self.dtype.is_complex):
            raise UnseenError(
                f"a {self.dtype} tensor on meta, made where nobody watches, has no values, but they are used"
            )
        blank(memory.allocate(self.cell), self.dtype)


@dataclass(eq=False, kw_only=True)
class Given(Step):
    """Records memory from outside: copied if it is small, else held by reference; a mapped file stays on disk."""

    cell: Cell
    storage: torch.UntypedStorage
    looks: Tensor
    is_own: bool = False
    is_lost: bool = False
    is_read: bool = False  # by a step

    @classmethod
    def of(cls, cell: Cell, storage: torch.UntypedStorage) -> Given:
        """Returns the step for `storage` as it is now, copied up to `SMALL_BYTES`."""
        given = cls(cell=cell, storage=storage, looks=looks(storage), overwrites=[cell])
        if cell.nbytes <= SMALL_BYTES:
            given.own()
        return given

    def own(self) -> None:
        """Copies the memory, once; later writes to the original no longer change it."""
        if not self.is_own:
            self.storage, self.is_own = bytes_of(self.storage).clone().untyped_storage(), True

    def run(self, memory: ReplayMemory) -> None:
        """Shares the memory with the replay; raises ChangedError if unseen code has changed it."""
        if self.is_lost or not (self.is_own or torch.equal(self.looks, looks(self.storage))):
            raise ChangedError(
                "memory that the factory gave was written again by code that nobody saw, and is read now"
            )
        memory.share(self.cell, self.storage)


@dataclass(eq=False, kw_only=True)
class Call(Step):
    """Records a torch operation. results: for each output tensor a view of the memory it made, None if it made none.

    seed: of its random numbers, or the generator's state before it drew them; None if it draws none.
    """

    func: Any
    args: Any
    kwargs: dict[str, Any]
    results: Sequence[Ref | None] = ()
    writes: Sequence[Cell] = ()
    seed: int | Tensor | None = None
    own_generator: bool = False

    def run(self, memory: ReplayMemory) -> None:
        """Calls the operation on the replayed inputs, with its recorded random state; stores the results."""
        for cell in self.writes:
            memory.make_own(cell)
        args, kwargs = map_only(Ref, memory.view, (self.args, self.kwargs))
        if self.own_generator:
            assert isinstance(self.seed, Tensor), self.func
            generator = torch.Generator()
            generator.set_state(self.seed)
            kwargs["generator"] = generator
        with seeded(None if self.own_generator else self.seed):
            found = tensors_of(self.func(*args, **kwargs))
        for ref, tensor in zip(self.results, found, strict=True):
            if ref is not None:
                memory.take(ref, tensor)


@torch.no_grad()
def replay(refs: Iterable[Ref]) -> list[Tensor]:
    """Returns the current values of `refs`. Raises ChangedError, UnseenError, and what an operation raises."""
    refs = list(refs)
    memory = ReplayMemory()
    for step in sorted(needed(refs), key=lambda step: step.number):
        step.run(memory)
    values: list[Tensor] = []
    cells = [ref.cell for ref in refs]
    for ref in refs:
        value = memory.value(ref)
        values.append(value.clone() if cells.count(ref.cell) > 1 else value)
    return values


def needed(refs: Iterable[Ref], *, from_kept: bool = False) -> set[Step]:
    """Returns the steps on which the values of `refs` depend. from_kept: a cell's `kept` value replaces its older steps."""
    found: set[Step] = set()
    ahead: list[tuple[int, Step]] = []

    def want(cell: Cell, before: int) -> None:
        """Adds the steps of `cell` before number `before` to the result and the queue."""
        for step in cell.history(before, from_kept=from_kept):
            if step not in found:
                found.add(step)
                heappush(ahead, (-step.number, step))

    for ref in refs:
        want(ref.cell, next(_numbers))
    while ahead:
        _, step = heappop(ahead)
        for cell in step.reads:
            want(cell, step.number)
    return found


def is_blank(ref: Ref) -> bool:
    """Returns whether the memory was never given a value."""
    return all(step.is_copy for step in needed([ref]))


def tensors_of(found: Any) -> list[Tensor]:
    """Returns the tensors in an operation's result, in order."""
    if isinstance(found, Tensor):
        return [found]
    return [one for each in found for one in tensors_of(each)] if isinstance(found, list | tuple) else []


class seeded:  # noqa: N801  # a context, in lower case as torch.no_grad
    """Is a context with torch's default generator at `seed` (a seed or a state; None: unchanged); restores it at the end."""

    def __init__(self, seed: int | Tensor | None) -> None:
        self.seed = seed

    def __enter__(self) -> None:
        if self.seed is None:
            return
        self.before = torch.default_generator.get_state()
        if isinstance(self.seed, int):
            torch.default_generator.manual_seed(self.seed)
        else:
            torch.default_generator.set_state(self.seed)

    def __exit__(self, *_: object) -> None:
        if self.seed is not None:
            torch.default_generator.set_state(self.before)

"""Knows of every tensor that a factory touches to which memory it belongs, and what was written there.

A parameter on meta and the real tensor that it was made of are one `Cell`: a write to either is a write to both, as in plain
PyTorch. Real memory is made to follow when it is read. Memory that others can write to unseen, because they made it (numpy,
a file) or were given it (`.numpy()`), is looked at again whenever it is used.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from sley_core.model.kept import Keeper
from sley_core.model.steps import Blank, Call, Cell, Given, Ref, Step
from sley_core.model.storage import bytes_of, looks

META = torch.device("meta")
HOST = torch.device("cpu")


@contextmanager
def unwatched() -> Iterator[None]:
    """Inside, operations are torch's own, whatever modes are on."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


class Journal:
    """The cells of all tensors that were seen, by the address of their memory.

    lock: who looks something up and then notes it holds this, for threads of the factory's that work at the same time.
    is_closed: the factory is done, and nothing is noted any more.
    """

    def __init__(self) -> None:
        self._cells: dict[int, Cell] = {}
        self._sweep_at = 10_000
        self._keeper = Keeper()
        self._lent: list[torch.UntypedStorage] = []
        self.lock = RLock()
        self.is_closed = False

    def close(self) -> None:
        """The factory is done: threads of its that go on are watched no more, and what was lent or kept goes."""
        with self.lock:
            self.is_closed = True
            self._lent.clear()
            self._keeper.close()

    def cell(self, tensor: Tensor) -> Cell:
        """The cell of a tensor's memory; what nobody saw before came from outside."""
        storage = tensor.untyped_storage()
        cell = self._cells.get(storage._cdata)
        if cell is None:
            cell = self._new(tensor, tensor.device)
            if tensor.is_meta:
                cell.steps.append(Blank(cell=cell, dtype=tensor.dtype, overwrites=[cell], is_unseen=True))
            else:
                cell.is_watched, cell.held = True, storage
                cell.steps.append(Given.of(cell, storage))
        return cell

    def made(self, tensor: Tensor, shown: torch.device | None = None) -> Ref:
        """A new cell for the memory of a tensor that an operation has just made, `shown` as on that device."""
        self._new(tensor, shown or tensor.device)
        return self.ref(tensor)

    def shown(self, tensor: Tensor) -> torch.device:
        """Where plain PyTorch would have the tensor, which may be on meta."""
        return self.cell(tensor).shown if tensor.is_meta else tensor.device

    def ref(self, tensor: Tensor) -> Ref:
        return Ref.of(tensor, self.cell(tensor))

    def twin(self, tensor: Tensor) -> Tensor:
        """A tensor on meta that is, for this journal, the same memory."""
        if tensor.is_meta:
            return tensor
        self.look(tensor, writes=False)
        cell = self.cell(tensor)
        if cell.twin is None:
            cell.twin = torch.empty(cell.nbytes, dtype=torch.uint8, device=META).untyped_storage()
            self._know(cell, cell.twin)
        return Ref.of(tensor, cell).over(cell.twin)

    def realised(self, tensor: Tensor) -> Tensor:
        """The values of a tensor on meta as they are now, a copy."""
        ref = self.ref(tensor)
        value = self._keeper.value(ref)
        made = self.made(value)
        step = Call(func=torch.ops.aten.clone.default, args=(ref,), kwargs={}, results=[made], is_copy=True)
        step.reads, step.overwrites = [ref.cell], [made.cell]
        self.note(step, [made.cell], [])
        return value

    def lend(self, tensor: Tensor, *, keep: bool = False) -> Tensor:
        """The values of a tensor on meta as they are now, in memory that those of the same cell share until it is written.

        keep: as long as the factory runs, for somebody who takes no more than the address.
        """
        cell = self.cell(tensor)
        number, known = cell.steps[-1].number, cell.lent
        storage = known[1]() if known is not None and known[0] == number else None
        if storage is None:
            value = self._keeper.value(Ref(cell, torch.uint8, 0, (cell.nbytes,), (1,)))
            storage = value.untyped_storage()
            cell.lent = (number, weakref.ref(storage))
        if keep:
            self._lent.append(storage)
        return Ref.of(tensor, cell).over(storage)

    def look(self, tensor: Tensor, *, writes: bool) -> None:
        """Before an operation on a real tensor: the memory has what was written to it on meta, and what was written unseen.

        writes: the operation is about to write it; who read it before keeps what it read.
        """
        cell = self.cell(tensor)
        if cell.is_stale:
            self.refresh(tensor)
        if cell.given is not None and not torch.equal(cell.given.looks, looks(tensor.untyped_storage())):
            cell.given.is_lost = not cell.given.is_own
            self.take_as_it_is(tensor)
        if writes and cell.given is not None and cell.given.is_read:
            cell.given.own()

    def refresh(self, tensor: Tensor) -> None:
        """The real memory gets what was written to it on meta."""
        with torch._C.DisableTorchFunction():  # lazy ones, which have a type of their own, refuse to be asked
            cell, storage = self.cell(tensor), tensor.untyped_storage()
        if not cell.is_stale:
            return
        every = bytes_of(storage)
        value = self._keeper.value(Ref(cell, torch.uint8, 0, (cell.nbytes,), (1,)))
        for step in cell.steps:
            if isinstance(step, Given):
                step.own()
        every.copy_(value)
        cell.is_stale = False
        if cell.is_watched:
            self.take_as_it_is(tensor)

    def take_as_it_is(self, tensor: Tensor) -> None:
        """What the real memory holds now came from outside."""
        cell = self.cell(tensor)
        cell.is_watched, cell.held = True, tensor.untyped_storage()
        if cell.given is not None and not cell.given.is_read:
            cell.steps.pop()
        cell.steps.append(Given.of(cell, tensor.untyped_storage()))

    def expose(self, tensor: Tensor) -> None:
        """From now on code that nobody sees may write to the real tensor."""
        self.look(tensor, writes=False)
        if not self.cell(tensor).is_watched:
            self.take_as_it_is(tensor)

    def note(self, step: Step, made: list[Cell], written: list[Tensor]) -> None:
        """Adds `step` to the history of the cells that it made or wrote; unseen writers leave no history to add it to."""
        for cell in step.reads:
            if cell.given is not None:
                cell.given.is_read = True
        for cell in made:
            cell.steps.append(step)
        for cell, tensor in {self.cell(tensor): tensor for tensor in written}.items():
            if cell.is_watched and not tensor.is_meta:
                self.take_as_it_is(tensor)
                continue
            cell.steps.append(step)
            if tensor.is_meta and cell.real is not None and not _is_gone(cell.real):
                cell.is_stale = True

    def settle(self, tensor: Tensor) -> None:
        """The last look at the real memory, if it is watched, that a tensor on meta stands for."""
        cell = self.cell(tensor)
        if cell.held is not None:
            self.look(bytes_of(cell.held), writes=False)
            cell.held = None

    def _new(self, tensor: Tensor, shown: torch.device) -> Cell:
        storage = tensor.untyped_storage()
        cell = Cell(storage.nbytes(), HOST if tensor.is_meta else tensor.device, shown)
        if not tensor.is_meta:
            cell.real = _weak(storage)
        self._know(cell, storage)
        return cell

    def _know(self, cell: Cell, storage: torch.UntypedStorage) -> None:
        cell.keys.append(_weak(storage))
        self._cells[storage._cdata] = cell
        if len(self._cells) > self._sweep_at:
            alive = {key: each for key, each in self._cells.items() if not all(map(_is_gone, each.keys))}
            self._cells, self._sweep_at = alive, 2 * len(alive) + 10_000


def _weak(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _is_gone(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]

"""Records, for every tensor that a factory touches, which memory it uses, and what was written there.

A meta parameter and the real tensor from which it was made are one `Cell`: a write to either counts as a write to both, as in
plain PyTorch. Real memory is brought up to date when it is read. Memory that unseen code may write to, because it made it
(numpy, a file) or was given it (`.numpy()`), is compared again whenever it is used.
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
    """Returns a context manager in which operations run unrecorded, whatever torch modes are on."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


class Journal:
    """Holds the cells of all tensors that were seen, by the address of their storage.

    lock: hold it for a lookup and the record that depends on it; threads of the factory run at the same time. is_closed: the
    factory has returned, and nothing is recorded any more.
    """

    def __init__(self) -> None:
        """Starts an empty journal; `_cells` is swept of freed memory once it has more than `_sweep_at` entries."""
        self._cells: dict[int, Cell] = {}
        self._sweep_at = 10_000
        self._keeper = Keeper()
        self._lent: list[torch.UntypedStorage] = []
        self.lock = RLock()
        self.is_closed = False

    def close(self) -> None:
        """Ends recording, also in threads of the factory that still run, and frees lent and kept memory."""
        with self.lock:
            self.is_closed = True
            self._lent.clear()
            self._keeper.close()

    def cell(self, tensor: Tensor) -> Cell:
        """Returns the cell of a tensor's memory; memory seen for the first time is recorded as given from outside."""
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
        """Registers the memory of an operation's new result and returns its view; `shown` is the device that code sees."""
        self._new(tensor, shown or tensor.device)
        return self.ref(tensor)

    def shown(self, tensor: Tensor) -> torch.device:
        """Returns the device on which plain PyTorch would have the tensor, which may be meta."""
        return self.cell(tensor).shown if tensor.is_meta else tensor.device

    def ref(self, tensor: Tensor) -> Ref:
        """Returns the tensor as a view of its cell."""
        return Ref.of(tensor, self.cell(tensor))

    def twin(self, tensor: Tensor) -> Tensor:
        """Returns a tensor on meta that stands for the same memory in this journal; a meta tensor is returned itself."""
        if tensor.is_meta:
            return tensor
        self.look(tensor, writes=False)
        cell = self.cell(tensor)
        if cell.twin is None:
            cell.twin = torch.empty(cell.nbytes, dtype=torch.uint8, device=META).untyped_storage()
            self._know(cell, cell.twin)
        return Ref.of(tensor, cell).over(cell.twin)

    def realised(self, tensor: Tensor) -> Tensor:
        """Returns a copy of a meta tensor with its current values, recorded as its clone."""
        ref = self.ref(tensor)
        value = self._keeper.value(ref)
        made = self.made(value)
        step = Call(func=torch.ops.aten.clone.default, args=(ref,), kwargs={}, results=[made], is_copy=True)
        step.reads, step.overwrites = [ref.cell], [made.cell]
        self.note(step, [made.cell], [])
        return value

    def lend(self, tensor: Tensor, *, keep: bool = False) -> Tensor:
        """Returns the current values of a meta tensor; tensors of one cell share that memory until the cell is written.

        keep: holds the memory until the factory ends, for a caller that takes only its address.
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
        """Brings a real tensor's memory up to date before an operation uses it, with writes on meta and unseen writes.

        writes: the operation is about to write it, so earlier readers get a copy of what they read.
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
        """Copies into the real memory what was written to it on meta, if anything."""
        with torch._C.DisableTorchFunction():  # lazy tensors are a subclass that refuses these calls
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
        """Records the real memory's current content as given from outside, in place of its history."""
        cell = self.cell(tensor)
        cell.is_watched, cell.held = True, tensor.untyped_storage()
        if cell.given is not None and not cell.given.is_read:
            cell.steps.pop()
        cell.steps.append(Given.of(cell, tensor.untyped_storage()))

    def expose(self, tensor: Tensor) -> None:
        """Marks the real tensor as memory that unseen code may write to from now on."""
        self.look(tensor, writes=False)
        if not self.cell(tensor).is_watched:
            self.take_as_it_is(tensor)

    def note(self, step: Step, made: list[Cell], written: list[Tensor]) -> None:
        """Appends `step` to the history of the cells that it made or wrote.

        Watched real memory is recorded as given again instead, because its history may miss unseen writes.
        """
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
        """Compares the real memory behind a meta tensor a last time, if it is watched, and drops the reference to it."""
        cell = self.cell(tensor)
        if cell.held is not None:
            self.look(bytes_of(cell.held), writes=False)
            cell.held = None

    def _new(self, tensor: Tensor, shown: torch.device) -> Cell:
        """Registers a new cell for a tensor's storage; a cell on meta is replayed on the host."""
        storage = tensor.untyped_storage()
        cell = Cell(storage.nbytes(), HOST if tensor.is_meta else tensor.device, shown)
        if not tensor.is_meta:
            cell.real = _weak(storage)
        self._know(cell, storage)
        return cell

    def _know(self, cell: Cell, storage: torch.UntypedStorage) -> None:
        """Maps a storage's address to `cell`; from time to time drops the cells whose memory is all freed."""
        cell.keys.append(_weak(storage))
        self._cells[storage._cdata] = cell
        if len(self._cells) > self._sweep_at:
            alive = {key: each for key, each in self._cells.items() if not all(map(_is_gone, each.keys))}
            self._cells, self._sweep_at = alive, 2 * len(alive) + 10_000


def _weak(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _is_gone(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]

"""Memory of a replay: what its steps have written so far, by cell."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_core.model.storage import blank, bytes_of

if TYPE_CHECKING:
    from sley_core.model.steps import Cell, Ref


class ReplayMemory:
    """Holds the memory that a replay has written so far, by cell. Shared memory is copied before it is written."""

    def __init__(self) -> None:
        self._storages: dict[Cell, torch.UntypedStorage] = {}
        self._shared: set[Cell] = set()

    def allocate(self, cell: Cell) -> torch.UntypedStorage:
        """Returns new uninitialised memory for the cell, on its device."""
        self._storages[cell] = torch.empty(cell.nbytes, dtype=torch.uint8, device=cell.device).untyped_storage()
        self._shared.discard(cell)
        return self._storages[cell]

    def share(self, cell: Cell, storage: torch.UntypedStorage) -> None:
        """Uses `storage`, which other code owns, as the cell's memory until the cell is written."""
        self._storages[cell] = storage
        self._shared.add(cell)

    def storages(self) -> Iterable[tuple[Cell, torch.UntypedStorage]]:
        """Returns the cells and their memory."""
        return self._storages.items()

    def make_own(self, cell: Cell) -> None:
        """Prepares the cell for a write: copies shared memory, and allocates missing memory."""
        if cell not in self._storages:
            self.allocate(cell)
        elif cell in self._shared:
            self._storages[cell] = bytes_of(self._storages[cell]).clone().untyped_storage()
            self._shared.discard(cell)

    def take(self, ref: Ref, tensor: Tensor) -> None:
        """Makes an operation's result the memory of `ref`'s cell, in the layout that was recorded.

        The result's own memory is reused if its layout is the same, else it is copied.
        """
        storage = tensor.untyped_storage()
        as_before = (tensor.storage_offset(), tensor.stride()) == (ref.offset, ref.stride)
        if (
            tuple(tensor.shape) != ref.size
        ):  # another kernel's result (empty statistics in evaluation) that nobody reads
            blank(self.allocate(ref.cell), ref.dtype)
        elif as_before and tensor.dtype == ref.dtype and storage.nbytes() == ref.cell.nbytes:
            self._storages[ref.cell] = storage
            self._shared.discard(ref.cell)
        else:
            self.allocate(ref.cell)
            self.view(ref).copy_(tensor)

    def view(self, ref: Ref) -> Tensor:
        """Returns `ref` as a tensor in this memory; memory that no step wrote is allocated uninitialised."""
        storage = self._storages.get(ref.cell)
        if storage is None:  # only its shape matters, or it is about to be overwritten
            storage = self.allocate(ref.cell)
        return ref.over(storage)

    def value(self, ref: Ref) -> Tensor:
        """Returns the values of `ref` in memory that nothing else uses, copied if necessary."""
        found = self.view(ref)
        if not ref.is_plain:
            return found.resolve_conj().resolve_neg()  # a copy
        alone = ref.is_whole and ref.cell not in self._shared
        return found if alone else found.clone(memory_format=torch.preserve_format)

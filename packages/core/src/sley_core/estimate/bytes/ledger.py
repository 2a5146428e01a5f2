"""What memory is born and freed, in order: every storage once, whoever looks at it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 64
"""Where torch lets memory on a host begin."""


class StepPlace(NamedTuple):
    """Where a step was. step: from 1; 0 before the first. entry: of its list, as F0.1. layer: the one that was called last."""

    step: int
    entry: str
    layer: str


@dataclass(eq=False)
class MemoryPiece:
    """The memory of one storage, from `born` to `died`, which are numbers of events; `died` is None while it is there.

    place, ended: where the step was then. owner: the part of the run that had it between two steps; "" if none has. A storage
    that gives its memory back and takes it again has a piece for each time.
    """

    num_bytes: int
    born: int
    place: StepPlace
    died: int | None = None
    ended: StepPlace | None = None
    owner: str = ""


class Ledger:
    """Notes the pieces of memory of all storages that it is shown, as they come, go and change their size.

    where: tells the place in the step, asked whenever memory comes or goes. pieces: in the order in which they came. now: the
    bytes that are there. num_events: so far.
    """

    def __init__(self, where: Callable[[], StepPlace]) -> None:
        self.where = where
        self.pieces: list[MemoryPiece] = []
        self.now = 0
        self.num_events = 0
        self._live: dict[int, MemoryPiece] = {}
        self._addresses: dict[int, tuple[int, int]] = {}
        self._next_address = ALIGNMENT
        self._asked: set[int] = set()
        self._silent: dict[int, int] = {}
        self._ignored: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def see(self, tensor: Tensor) -> None:
        """Notes the memory of `tensor` unless it is known, and follows it from now on."""
        if self._silent:
            self._look()
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._ignored:
            return
        if key not in self._watched:
            self._watched[key] = weakref.ref(storage, partial(self._gone, key))
            if key in self._asked:
                self._asked.discard(key)
                self.ask(storage)
        self.resized(storage)

    def ignore(self, tensor: Tensor) -> None:
        """Never counts the memory of `tensor`, whatever is made of it."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._ignored[key] = weakref.ref(storage, partial(self._forget, key))

    def ask(self, storage: torch.UntypedStorage) -> None:
        """From now on asks whether `storage` is alive, before memory comes: a weak reference of torch's own keeps the Python
        object of a storage that is gone, so that nobody is told.
        """
        key = storage._cdata
        if key not in self._watched:
            self._asked.add(key)
        elif key not in self._silent:
            self._silent[key] = torch._C.StorageBase._weak_ref(storage)  # type: ignore[attr-defined]  # torch's

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Notes that a storage that is followed may have another size now."""
        key = storage._cdata
        if key not in self._watched:
            return
        piece, num_bytes = self._live.get(key), storage.nbytes()
        if (piece.num_bytes if piece else 0) == num_bytes:
            return
        if piece is not None:
            self._free(key)
        if num_bytes:
            self.num_events += 1
            self._live[key] = made = MemoryPiece(num_bytes, self.num_events, self.where())
            self.pieces.append(made)
            self.now += num_bytes

    def pass_by(self, num_bytes: int) -> None:
        """Notes memory that comes and goes at once: an operator's own, beside its result."""
        if num_bytes:
            self.num_events += 2
            place = self.where()
            self.pieces.append(MemoryPiece(num_bytes, self.num_events - 1, place, self.num_events, place))

    def address(self, storage: torch.UntypedStorage) -> int:
        """Returns where `storage` would lie: no two that are there overlap. 0 for one without memory, as torch says."""
        key, num_bytes = storage._cdata, storage.nbytes()
        if not num_bytes:
            return 0
        first, size = self._addresses.get(key, (0, 0))
        if size != num_bytes or not (key in self._watched or key in self._ignored):
            first, self._next_address = self._next_address, self._next_address + num_bytes + ALIGNMENT
            self._next_address -= self._next_address % ALIGNMENT
            self._addresses[key] = first, num_bytes
        return first

    def lies_in(self, tensor: Tensor, memory: Tensor) -> None:
        """Notes that the storage of `tensor`, which is ignored, begins where `memory` does: by address they are one."""
        storage = tensor.untyped_storage()
        assert storage._cdata in self._ignored, "memory of two storages would count twice"
        start = self.address(memory.untyped_storage()) + int(memory.storage_offset()) * memory.element_size()
        self._addresses[storage._cdata] = start, storage.nbytes()

    def piece_of(self, tensor: Tensor) -> MemoryPiece | None:
        """Returns the memory that `tensor` has now; None where it has none, or was never seen."""
        return self._live.get(tensor.untyped_storage()._cdata)

    def forgo(self, tensor: Tensor) -> None:
        """Counts the memory of `tensor` as none, also of the time before: it lies elsewhere."""
        key = tensor.untyped_storage()._cdata
        self._watched.pop(key, None)
        if (piece := self._live.pop(key, None)) is not None:
            self.now -= piece.num_bytes
            piece.num_bytes = 0
        self.ignore(tensor)

    def move_up(self, owners: Collection[str], event: int, place: StepPlace) -> None:
        """Lets what `owners` have and got after `event` be there from then on, in `place`: they do not give it back."""
        for piece in self._live.values():
            if piece.owner in owners and piece.born > event:
                piece.born, piece.place = event, place

    def peak(self) -> tuple[int, int]:
        """Returns the most bytes that were there at once, and the number of the last event that brought as many."""
        return max(((total, at) for at, total, _ in self._totals()), default=(0, 0))

    def alive_at(self, event: int) -> list[MemoryPiece]:
        """Returns the pieces that were there right after an event."""
        return [one for one in self.pieces if one.born <= event and (one.died is None or one.died > event)]

    def place_at(self, event: int) -> StepPlace:
        """Returns where the step was at an event that brought memory."""
        return next((one.place for one in self.pieces if one.born == event), StepPlace(0, "", ""))

    def curve(self, step: int) -> list[tuple[str, int]]:
        """Returns the entries of step `step` in which memory came or went, in order, each with the most bytes in it."""
        found: list[tuple[str, int]] = []
        for _, total, place in self._totals():
            if place.step != step:
                continue
            if found and found[-1][0] == place.entry:
                found[-1] = place.entry, max(found[-1][1], total)
            else:
                found.append((place.entry, total))
        return found

    def _totals(self) -> Iterator[tuple[int, int, StepPlace]]:
        """Yields every event's number, the bytes after it, and where the step was."""
        events = [(one.born, one.num_bytes, one.place) for one in self.pieces]
        events += [(one.died, -one.num_bytes, one.ended) for one in self.pieces if one.died and one.ended]
        total = 0
        for at, change, place in sorted(events):
            total += change
            yield at, total, place

    def _look(self) -> None:
        """Notes those that are gone of whom nobody tells."""
        for key, reference in list(self._silent.items()):
            if torch.UntypedStorage._expired(reference):
                del self._silent[key]
                torch.UntypedStorage._free_weak_ref(reference)  # type: ignore[no-untyped-call]  # torch's
                self._gone(key, None)

    def _forget(self, key: int, _: object) -> None:
        del self._ignored[key]
        self._addresses.pop(key, None)

    def _gone(self, key: int, _: object) -> None:
        self._watched.pop(key, None)
        self._addresses.pop(key, None)
        if key in self._live:
            self._free(key)

    def _free(self, key: int) -> None:
        piece = self._live.pop(key)
        self.num_events += 1
        piece.died, piece.ended = self.num_events, self.where()
        self.now -= piece.num_bytes

"""Notes which memory comes and goes, in order: every storage once, whoever looks at it."""

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
        """Counts the storage of `tensor` from now on, until it is gone; if it is counted already, notes a change of its size.

        Does nothing for a storage that is ignored. First notes the end of storages that `ask` follows and that are gone.
        """
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
        """Makes `see` pass over the storage of `tensor`, as long as that lives. What was counted of it before stays counted."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._ignored[key] = weakref.ref(storage, partial(self._forget, key))

    def ask(self, storage: torch.UntypedStorage) -> None:
        """Checks from now on, at each `see`, whether `storage` is gone: once torch holds a weak reference of its own to it,
        that keeps its Python object, and Python's weak references do not tell. A storage that is not counted yet is checked
        once it is.
        """
        key = storage._cdata
        if key not in self._watched:
            self._asked.add(key)
        elif key not in self._silent:
            self._silent[key] = torch._C.StorageBase._weak_ref(storage)  # type: ignore[attr-defined]  # torch's

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Notes the size that a counted storage has now: if it changed, its piece ends, and another begins unless it is empty.
        Does nothing for a storage that is not counted.
        """
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
        """Adds a piece of `num_bytes` that comes and goes at once: what an operator takes beside its result. Nothing for 0
        bytes.
        """
        if num_bytes:
            self.num_events += 2
            place = self.where()
            self.pieces.append(MemoryPiece(num_bytes, self.num_events - 1, place, self.num_events, place))

    def address(self, storage: torch.UntypedStorage) -> int:
        """Returns an address for `storage` such that no two storages that are there overlap; 0 for one without memory, as torch
        says.

        It stays the same until the storage is gone or has another size; one that is neither counted nor ignored gets a new one
        at each call.
        """
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
        """Sets the address of the storage of `tensor`, which must be ignored, to where the data of `memory` begin: both are one
        memory.
        """
        storage = tensor.untyped_storage()
        assert storage._cdata in self._ignored, "memory of two storages would count twice"
        start = self.address(memory.untyped_storage()) + int(memory.storage_offset()) * memory.element_size()
        self._addresses[storage._cdata] = start, storage.nbytes()

    def piece_of(self, tensor: Tensor) -> MemoryPiece | None:
        """Returns the piece that counts the memory of `tensor` now; None where it has no memory, or is not counted."""
        return self._live.get(tensor.untyped_storage()._cdata)

    def forgo(self, tensor: Tensor) -> None:
        """Sets the piece of `tensor` to 0 bytes, also for the time before, and ignores its storage from now on: it lies
        elsewhere.
        """
        key = tensor.untyped_storage()._cdata
        self._watched.pop(key, None)
        if (piece := self._live.pop(key, None)) is not None:
            self.now -= piece.num_bytes
            piece.num_bytes = 0
        self.ignore(tensor)

    def move_up(self, owners: Collection[str], event: int, place: StepPlace) -> None:
        """Dates back the pieces that are there, belong to one of `owners` and came after event number `event`: they count as
        there from that event on, in `place`, since a long run does not give them back.
        """
        for piece in self._live.values():
            if piece.owner in owners and piece.born > event:
                piece.born, piece.place = event, place

    def peak(self) -> tuple[int, int]:
        """Returns the most bytes that were there at once, and the number of the last event at which there were as many; (0, 0)
        if there was never any memory.
        """
        return max(((total, at) for at, total, _ in self._totals()), default=(0, 0))

    def alive_at(self, event: int) -> list[MemoryPiece]:
        """Returns the pieces that were there right after event number `event`, in the order in which they came."""
        return [one for one in self.pieces if one.born <= event and (one.died is None or one.died > event)]

    def place_at(self, event: int) -> StepPlace:
        """Returns where the step was when event number `event` brought memory; step 0, with empty words, if it brought none."""
        return next((one.place for one in self.pieces if one.born == event), StepPlace(0, "", ""))

    def curve(self, step: int) -> list[tuple[str, int]]:
        """Returns pairs of an entry of step `step` and the most bytes that were there during it, in order; only entries in
        which memory came or went.
        """
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
        """Yields, for each event in order, its number, the bytes that are there after it, and where the step was."""
        events = [(one.born, one.num_bytes, one.place) for one in self.pieces]
        events += [(one.died, -one.num_bytes, one.ended) for one in self.pieces if one.died and one.ended]
        total = 0
        for at, change, place in sorted(events):
            total += change
            yield at, total, place

    def _look(self) -> None:
        """Notes the end of all storages that `ask` follows and that are gone."""
        for key, reference in list(self._silent.items()):
            if torch.UntypedStorage._expired(reference):
                del self._silent[key]
                torch.UntypedStorage._free_weak_ref(reference)  # type: ignore[no-untyped-call]  # torch's
                self._gone(key, None)

    def _forget(self, key: int, _: object) -> None:
        """Drops what is known of an ignored storage that is gone."""
        del self._ignored[key]
        self._addresses.pop(key, None)

    def _gone(self, key: int, _: object) -> None:
        """Drops what is known of a counted storage that is gone, and ends its piece, if it has one."""
        self._watched.pop(key, None)
        self._addresses.pop(key, None)
        if key in self._live:
            self._free(key)

    def _free(self, key: int) -> None:
        """Ends the piece of a storage now: a new event, and fewer bytes."""
        piece = self._live.pop(key)
        self.num_events += 1
        piece.died, piece.ended = self.num_events, self.where()
        self.now -= piece.num_bytes

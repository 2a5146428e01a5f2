"""What memory is born and freed, in order: every storage once, whoever looks at it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor


@dataclass(eq=False)
class Piece:
    """The memory of one storage, from `born` to `died`, which are numbers of events; `died` is None while it is there.

    place: where the step was when it came. A storage that gives its memory back and takes it again has a piece for each time.
    """

    num_bytes: int
    born: int
    place: str
    died: int | None = None


class Ledger:
    """Notes the pieces of memory of all storages that it is shown, as they come, go and change their size.

    where: tells the place in the step, asked whenever memory comes. pieces: in the order in which they came. now: the bytes that
    are there. num_events: so far.
    """

    def __init__(self, where: Callable[[], str]) -> None:
        self.where = where
        self.pieces: list[Piece] = []
        self.now = 0
        self.num_events = 0
        self._live: dict[int, Piece] = {}
        self._ignored: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def see(self, tensor: Tensor) -> None:
        """Notes the memory of `tensor` unless it is known, and follows it from now on."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._ignored:
            return
        if key not in self._watched:
            self._watched[key] = weakref.ref(storage, partial(self._gone, key))
        self.resized(storage)

    def ignore(self, tensor: Tensor) -> None:
        """Never counts the memory of `tensor`, whatever is made of it."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._ignored[key] = weakref.ref(storage, partial(self._forget, key))

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
            self._live[key] = made = Piece(num_bytes, self.num_events, self.where())
            self.pieces.append(made)
            self.now += num_bytes

    def piece_of(self, tensor: Tensor) -> Piece | None:
        """Returns the memory that `tensor` has now; None where it has none, or was never seen."""
        return self._live.get(tensor.untyped_storage()._cdata)

    def take(self, num_bytes: int) -> None:
        """Notes memory that is there for a moment: it comes and goes."""
        if num_bytes:
            self.num_events += 2
            self.pieces.append(Piece(num_bytes, self.num_events - 1, self.where(), self.num_events))

    def _forget(self, key: int, _: object) -> None:
        del self._ignored[key]

    def _gone(self, key: int, _: object) -> None:
        self._watched.pop(key, None)
        if key in self._live:
            self._free(key)

    def _free(self, key: int) -> None:
        piece = self._live.pop(key)
        self.num_events += 1
        piece.died = self.num_events
        self.now -= piece.num_bytes

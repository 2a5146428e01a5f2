"""Counts memory: every storage once, from its first use to its end, and where the step was at both."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as PROMOTION
from torch._prims_common import elementwise_dtypes

from sley_core.comm.copies import storage_id
from sley_core.run import Run

ALIGNMENT = 64  # of torch's allocations on a host, bytes


class StepPlace(NamedTuple):
    """A place in a step. step: from 1; 0 before the first. entry: of its list, as F0.1. layer: the last one called."""

    step: int
    entry: str
    layer: str


class StepProgress:
    """Returns, when called, where the run that it follows is; step 0, "the start of the run", before `follow`."""

    def __init__(self) -> None:
        self._run: Run | None = None
        self._at: object = None
        self._place = StepPlace(0, "the start of the run", "")

    def follow(self, run: Run) -> None:
        self._run = run

    def __call__(self) -> StepPlace:
        if self._run is None:
            return self._place
        progress = self._run.groups.progress.step_progress
        at = progress.step, progress.pending, progress.layer
        if at != self._at:  # texts are made once per place
            self._at, self._place = at, StepPlace(progress.step, str(progress.pending), progress.layer)
        return self._place


@dataclass(eq=False)
class MemoryPiece:
    """The memory of one storage, from event `born` to event `died` (None: still there); place, ended: where the step was then.
    owner: the part of the run that holds it between two steps; "" if none. A storage that is resized has a piece per size.
    """

    num_bytes: int
    born: int
    place: StepPlace
    died: int | None = None
    ended: StepPlace | None = None
    owner: str = ""


class Ledger:
    """Records storages. where: gives the place in the step. pieces: by birth. now: bytes. num_events: allocations and frees."""

    def __init__(self, where: Callable[[], StepPlace]) -> None:
        self.where = where
        self.pieces: list[MemoryPiece] = []
        self.now = 0
        self.num_events = 0
        self._live: dict[int, MemoryPiece] = {}
        self._addresses: dict[int, tuple[int, int]] = {}
        self._next_address = ALIGNMENT
        self._to_poll: set[int] = set()
        self._polled: dict[int, int] = {}
        self._ignored: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def see(self, tensor: Tensor) -> None:
        """Counts the storage of `tensor` until it is freed, or notes its new size; skips an ignored one."""
        for watched, reference in list(self._polled.items()):
            if torch.UntypedStorage._expired(reference):
                del self._polled[watched]
                torch.UntypedStorage._free_weak_ref(reference)  # type: ignore[no-untyped-call]  # torch's
                self._gone(watched, None)
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._ignored:
            return
        if key not in self._watched:
            self._watched[key] = weakref.ref(storage, partial(self._gone, key))
            if key in self._to_poll:
                self._to_poll.discard(key)
                self.poll(storage)
        self.resized(storage)

    def ignore(self, tensor: Tensor) -> None:
        """Makes `see` skip the storage of `tensor` from now on."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._ignored[key] = weakref.ref(storage, partial(self._forget, key))

    def poll(self, storage: torch.UntypedStorage) -> None:
        """Checks at each `see` whether `storage` is freed: torch's weak reference to it hides that from Python's."""
        key = storage._cdata
        if key not in self._watched:
            self._to_poll.add(key)
        elif key not in self._polled:
            self._polled[key] = torch._C.StorageBase._weak_ref(storage)  # type: ignore[attr-defined]  # torch's

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Notes the present size of a counted storage; does nothing for others."""
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
            self._live[key] = piece = MemoryPiece(num_bytes, self.num_events, self.where())
            self.pieces.append(piece)
            self.now += num_bytes

    def scratch(self, num_bytes: int) -> None:
        """Adds `num_bytes` that an operator allocates and frees at once."""
        if num_bytes:
            self.num_events += 2
            place = self.where()
            self.pieces.append(MemoryPiece(num_bytes, self.num_events - 1, place, self.num_events, place))

    def address(self, storage: torch.UntypedStorage) -> int:
        """Returns an address for `storage` that no other live storage overlaps, until it is resized; 0 if it is empty."""
        key, num_bytes = storage._cdata, storage.nbytes()
        if not num_bytes:
            return 0
        first, size = self._addresses.get(key, (0, 0))
        if size != num_bytes or not (key in self._watched or key in self._ignored):
            first, self._next_address = self._next_address, self._next_address + num_bytes + ALIGNMENT
            self._next_address -= self._next_address % ALIGNMENT
            self._addresses[key] = first, num_bytes
        return first

    def place_in(self, tensor: Tensor, memory: Tensor) -> None:
        """Sets the address of `tensor`, which must be ignored, to that of `memory`: both are the same memory."""
        storage = tensor.untyped_storage()
        assert storage._cdata in self._ignored, "memory of two storages would count twice"
        start = self.address(memory.untyped_storage()) + int(memory.storage_offset()) * memory.element_size()
        self._addresses[storage._cdata] = start, storage.nbytes()

    def piece_of(self, tensor: Tensor) -> MemoryPiece | None:
        """Returns the live piece of `tensor`; None if it is empty or not counted."""
        return self._live.get(storage_id(tensor))

    def move_out(self, tensor: Tensor) -> None:
        """Sets the piece of `tensor` to 0 bytes, in the past too, and ignores its storage: it lies on another device."""
        key = storage_id(tensor)
        self._watched.pop(key, None)
        if (piece := self._live.pop(key, None)) is not None:
            self.now -= piece.num_bytes
            piece.num_bytes = 0
        self.ignore(tensor)

    def date_back(self, owners: Collection[str], event: int, place: StepPlace) -> None:
        """Counts live pieces of `owners` from `event` and `place` on, if they came later: a long run has them by then."""
        for piece in self._live.values():
            if piece.owner in owners and piece.born > event:
                piece.born, piece.place = event, place

    def peak(self) -> tuple[int, StepPlace, list[MemoryPiece]]:
        """Returns the most bytes at once, where the step was at the last event with as many, and the pieces then, by birth;
        step 0 if there was no memory.
        """
        num_bytes, event = max(((total, at) for at, total, _ in self._totals()), default=(0, 0))
        place = next((piece.place for piece in self.pieces if piece.born == event), StepPlace(0, "", ""))
        alive = [piece for piece in self.pieces if piece.born <= event and (piece.died is None or piece.died > event)]
        return num_bytes, place, alive

    def curve(self, step: int) -> list[tuple[str, int]]:
        """Returns (entry, most bytes during it) for each entry of a step in which memory came or went, in order."""
        curve: list[tuple[str, int]] = []
        for _, total, place in self._totals():
            if place.step != step:
                continue
            if curve and curve[-1][0] == place.entry:
                curve[-1] = place.entry, max(curve[-1][1], total)
            else:
                curve.append((place.entry, total))
        return curve

    def _totals(self) -> Iterator[tuple[int, int, StepPlace]]:
        """Yields (event, bytes after it, place), in order."""
        events = [(piece.born, piece.num_bytes, piece.place) for piece in self.pieces]
        events += [(piece.died, -piece.num_bytes, piece.ended) for piece in self.pieces if piece.died and piece.ended]
        total = 0
        for at, change, place in sorted(events):
            total += change
            yield at, total, place

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


_aten = torch.ops.aten
_CHOOSE = {_aten.where, _aten.masked_fill}  # their bool condition is not converted

_REDUCE = {_aten.sum, _aten.mean, _aten.prod, _aten.linalg_vector_norm}
"""They convert their input to the dtype of their result; a mean to fp32 at least."""


def scratch_bytes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Returns the bytes of the copies in a common dtype that the CPU's operator `func` makes inside itself, as for
    `fp32.add_(fp16)`: TensorIterator has kernels of one dtype only. 0 for other than elementwise operators and reductions.
    """
    packet = func._overloadpacket
    if packet in _REDUCE:
        is_mean = packet is _aten.mean and result.dtype.is_floating_point
        return _copied_bytes([args[0]], torch.promote_types(result.dtype, torch.float32) if is_mean else result.dtype)
    if torch.Tag.pointwise not in func.tags or not isinstance(result, Tensor):
        return 0
    inputs = [*args, *(value for name, value in kwargs.items() if name != "out")]
    if packet in _CHOOSE:
        inputs = [value for value in inputs if not (isinstance(value, Tensor) and value.dtype == torch.bool)]
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    if all(tensor.dtype == result.dtype for tensor in tensors):
        return 0
    numbers = (value for value in inputs if isinstance(value, Tensor | bool | int | float))
    common = elementwise_dtypes(*numbers, type_promotion_kind=PROMOTION.DEFAULT)[1]
    if result.dtype.is_floating_point and not common.is_floating_point:
        common = result.dtype  # of integers, as by a division
    is_in_place = "out" in kwargs or any(result is tensor for tensor in tensors)
    written = [result] if is_in_place and result.dtype != torch.bool else []
    return _copied_bytes([*tensors, *written], common)


def _copied_bytes(tensors: Sequence[Tensor], dtype: torch.dtype) -> int:
    return sum(tensor.numel() * dtype.itemsize for tensor in tensors if tensor.dtype != dtype)

"""Reads the bytes of live tensors: from their own memory while they are unchanged, from copies made before they change.

writer     | copies a, b, c | writes a | b ....... | c ....... |
training   forward, backward ....... | update | next forward ...

Copying is several times as fast as writing. So unless the previous save was not finished by then, everything is copied first,
during the forward, and the update need not wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from threading import Condition
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_checkpoint.format import bytes_of
from sley_core.api.memory import version_of
from sley_core.api.state import TensorPiece
from sley_core.errors import RunError

if TYPE_CHECKING:
    from sley_core.api.comm import CopyEvent, CopyStream, Device, HostMemory

CHUNK_BYTES = 4 << 20
"""The bytes that are read at once; `stage` waits until as many are copied, at most."""


class LiveBytes:
    """Reads the bytes of `pieces`, each once, in order, by a thread. Tensors on an asynchronous device are copied to the host
    from the beginning, overlapped with the device's own work. memory: for copies of one save at a time.

    num_copied: bytes that were copied on the host. num_unread: bytes on the host that were not read when `stage` was called,
    and had to be copied before it returned.
    """

    def __init__(self, pieces: Sequence[TensorPiece], device: Device, memory: KeptMemory) -> None:
        self.num_copied = self.num_unread = 0
        self._turn = Condition()
        self._is_wanted = False
        self._is_staged = False
        self._sources: dict[int, Tensor] = {id(piece): piece.tensor.detach() for piece in pieces}
        self._versions = [(piece, version_of(piece.tensor)) for piece in pieces]
        self._torn = ""
        self._bounce = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        self._event: CopyEvent | None = None
        if device.is_async:
            self._send(pieces, device, memory)
        living = {
            key: source for key, source in self._sources.items() if source.device.type == "cpu" and not self._is_host(source)
        }
        self._places = memory.places(living)
        self._on_host = set(living)

    def copy_ahead(self) -> None:
        """Copies everything; ends early once `stage` is called, which does the rest."""
        for key in list(self._places):
            source, place = self._sources[key], self._places.get(key)
            if place is None or not source.is_contiguous():
                continue
            for start in range(0, source.nbytes, CHUNK_BYTES):
                with self._turn:
                    self._turn.wait_for(lambda: not self._is_wanted)
                    if self._is_staged:
                        return
                    end = start + CHUNK_BYTES
                    _flat(place)[start:end].copy_(_flat(source)[start:end])
                    if end >= source.nbytes:
                        self._has_copy(key)

    def chunks(self, piece: TensorPiece) -> Iterator[memoryview]:
        """Yields the bytes of `piece`, in order; each chunk is valid until the next is requested.

        Raises RunError `checkpoint-failed` if a program has written to a tensor meanwhile.
        """
        if self._event is not None:
            self._event.wait()
        done = 0
        while done < piece.num_bytes:
            with self._turn:
                self._turn.wait_for(lambda: not self._is_wanted)
                chunk = self._chunk(piece, done)
            yield chunk  # not in turn: a disk that stalls does not hold up training
            done += len(chunk)
        with self._turn:
            self._sources.pop(id(piece))
            self._places.pop(id(piece), None)

    def _chunk(self, piece: TensorPiece, done: int) -> memoryview:
        """Returns the bytes from `done` on: of a copy, or copied now from the live tensor."""
        if self._torn:
            raise RunError("checkpoint-failed", f"the program wrote to {self._torn!r} while it was being saved")
        source = self._sources[id(piece)]
        if not source.is_contiguous():
            source = self._sources[id(piece)] = source.contiguous()
        chunk = _flat(source)[done : done + CHUNK_BYTES]
        if id(piece) not in self._places:
            return bytes_of(chunk)
        return bytes_of(self._bounce[: len(chunk)].copy_(chunk))

    def stage(self) -> None:
        """Copies the bytes that are not read yet, so that tensors may change from now on. Does nothing the second time.

        Leaves out what a program has written to since the beginning: reading that raises.
        """
        if self._is_staged:
            return
        self._is_wanted = True
        with self._turn:
            try:
                if self._event is not None:
                    self._event.hold_device()
                changed = (piece.name for piece, version in self._versions if version_of(piece.tensor) != version)
                self._torn = next(changed, "")
                self.num_unread = sum(one.nbytes for key, one in self._sources.items() if key in self._on_host)
                self._copy()
            finally:
                self._is_wanted, self._is_staged = False, True
                self._turn.notify_all()

    def _copy(self) -> None:
        for key in list(self._places):
            self._places[key].copy_(self._sources[key])
            self._has_copy(key)

    def _has_copy(self, key: int) -> None:
        self._sources[key] = self._places.pop(key)
        self.num_copied += self._sources[key].nbytes

    def _is_host(self, source: Tensor) -> bool:
        """Returns whether `source` is the host copy from an asynchronous device, which nobody else changes."""
        return self._event is not None and source.untyped_storage().data_ptr() == self._sent.data_ptr()

    def _send(self, pieces: Sequence[TensorPiece], device: Device, memory: KeptMemory) -> None:
        """Starts to copy tensors on the device into page-locked host memory; the device's next update waits for it."""
        there = [piece for piece in pieces if piece.tensor.device.type != "cpu" or device.type == "cpu"]
        starts, end = [], 0
        for piece in there:
            starts.append(end)
            end += -(-piece.num_bytes // 256) * 256
        self._sent, stream = memory.sent(device, end)
        stream.follow()
        for piece, start in zip(there, starts, strict=True):
            host = self._sent[start : start + piece.num_bytes].view(piece.tensor.dtype).view(piece.rectangle.sizes)
            stream.copy(host, self._sources[id(piece)])
            self._sources[id(piece)] = host
        self._event = stream.record()


class KeptMemory:
    """Keeps host memory for copies from one save to the next: writing to new memory costs a page fault for each page, several
    times as long as the copy, and locking the pages takes as long again.
    """

    def __init__(self) -> None:
        self._data = torch.empty(0, dtype=torch.uint8)
        self._locked: HostMemory | None = None
        self._stream: CopyStream | None = None

    def places(self, tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Returns memory for a contiguous copy of each of `tensors`, by the same keys; that of the previous call becomes
        invalid.

        Memory that is never written to takes no pages.
        """
        starts = list(accumulate((_aligned(one.nbytes) for one in tensors.values()), initial=0))
        if self._data.numel() < starts[-1]:
            self._data = torch.empty(starts[-1], dtype=torch.uint8)
        return {
            key: self._data[start : start + one.nbytes].view(one.dtype).view(one.shape)
            for (key, one), start in zip(tensors.items(), starts, strict=False)
        }

    def sent(self, device: Device, num_bytes: int) -> tuple[Tensor, CopyStream]:
        """Returns host memory for copies from an asynchronous `device`, uint8 [num_bytes] or more, page-locked until `free`,
        and the stream for them; the memory of the previous call becomes invalid. If it needs more than before, waits for
        the copies of a save that was given up.
        """
        if self._stream is None:
            self._stream = device.copy_stream()
        if self._locked is None or self._locked.data.numel() < num_bytes:
            self._unlock()
            self._locked = device.host_memory(num_bytes)
        return self._locked.data, self._stream

    def free(self) -> None:
        """Frees the memory, once nothing reads copies any more."""
        self._data = torch.empty(0, dtype=torch.uint8)
        self._unlock()

    def _unlock(self) -> None:
        if self._stream is not None:
            self._stream.record().wait()  # copies may still write there
        self._locked = None


def copied(piece: TensorPiece) -> TensorPiece:
    """Returns the piece with a copy of its tensor, which may change at any time."""
    return TensorPiece(piece.name, piece.shape, piece.rectangle, torch.clone(piece.tensor.detach()))


def _flat(tensor: Tensor) -> Tensor:
    """Returns the bytes of a contiguous tensor, a view."""
    return tensor.reshape(-1).view(torch.uint8)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64

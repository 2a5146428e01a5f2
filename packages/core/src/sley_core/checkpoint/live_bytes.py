"""The bytes of tensors that go on living: read where they lie while they stay as they are, copied aside before they change.

writer     | a | b | c c ....... | d | e |
training   forward, backward ... | copies c's rest, d, e | update | next forward ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Condition
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_core.checkpoint.tensor_file import TensorPiece, bytes_of
from sley_core.errors import RunError

if TYPE_CHECKING:
    from sley_core.comm.copies import CopyEvent
    from sley_core.comm.device import Device

CHUNK_BYTES = 4 << 20
"""What is read at once; `secure` waits until one of them is copied, at most."""


class LiveBytes:
    """Of `pieces`, each read once, in order, by a thread. What lies on an asynchronous device is on its way to the host from
    the beginning, beside the device's own work.

    num_copied: bytes that `secure` had to copy on the host.
    """

    def __init__(self, pieces: Sequence[TensorPiece], device: Device) -> None:
        self.num_copied = 0
        self._turn = Condition()
        self._is_wanted = False
        self._is_secure = False
        self._sources: dict[int, Tensor] = {id(piece): piece.tensor.detach() for piece in pieces}
        self._versions = [(piece, piece.tensor._version) for piece in pieces]
        self._torn = ""
        self._bounce = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        self._event: CopyEvent | None = None
        if device.is_async:
            self._send(pieces, device)

    def chunks(self, piece: TensorPiece) -> Iterator[memoryview]:
        """Yields the bytes of `piece`, in order; each is used before the next is asked for.

        Raises RunError `checkpoint-failed` if a program has written to a tensor meanwhile.
        """
        if self._event is not None:
            self._event.wait()
        done = 0
        while done < piece.num_bytes:
            with self._turn:
                while self._is_wanted:
                    self._turn.wait()
                chunk = self._chunk(piece, done)
            yield chunk  # not in turn: a disk that stalls does not hold up training
            done += len(chunk)
        with self._turn:
            self._sources.pop(id(piece))

    def _chunk(self, piece: TensorPiece, done: int) -> memoryview:
        """Returns the bytes from `done` on: of a copy, or copied now from what lives."""
        if self._torn:
            raise RunError("checkpoint-failed", f"the program wrote to {self._torn!r} while it was being saved")
        source = self._sources[id(piece)]
        if not source.is_contiguous():
            source = self._sources[id(piece)] = source.contiguous()
        chunk = source.reshape(-1).view(torch.uint8)[done : done + CHUNK_BYTES]
        if self._is_secure or self._is_own(source):
            return bytes_of(chunk)
        return bytes_of(self._bounce[: len(chunk)].copy_(chunk))

    def secure(self) -> None:
        """Copies aside what is not read yet: its owner may change from now on. Does nothing the second time.

        What a program has written to since the beginning is neither the one nor the other: reading it raises then.
        """
        if self._is_secure:
            return
        self._is_wanted = True
        with self._turn:
            try:
                if self._event is not None:
                    self._event.hold_device()
                changed = (piece.name for piece, version in self._versions if piece.tensor._version != version)
                self._torn = next(changed, "")
                self._copy()
            finally:
                self._is_wanted, self._is_secure = False, True
                self._turn.notify_all()

    def _copy(self) -> None:
        for key, source in self._sources.items():
            if source.device.type == "cpu" and not self._is_own(source):
                self._sources[key] = source.clone() if source.is_contiguous() else source.contiguous()
                self.num_copied += source.numel() * source.element_size()

    def _is_own(self, source: Tensor) -> bool:
        return self._event is not None and source.untyped_storage().data_ptr() == self._memory.data_ptr()

    def _send(self, pieces: Sequence[TensorPiece], device: Device) -> None:
        """Starts to copy what lies on the device into page-locked memory of the host; the device's next update waits for it."""
        there = [piece for piece in pieces if piece.tensor.device.type != "cpu"]
        starts, end = [], 0
        for piece in there:
            starts.append(end)
            end += -(-piece.num_bytes // 256) * 256
        self._memory = device.host_memory(end).data
        stream = device.copy_stream()
        stream.follow()
        for piece, start in zip(there, starts, strict=True):
            host = self._memory[start : start + piece.num_bytes].view(piece.tensor.dtype).view(piece.rectangle.sizes)
            stream.copy(host, self._sources[id(piece)])
            self._sources[id(piece)] = host
        self._event = stream.record()


def copied(piece: TensorPiece) -> TensorPiece:
    """Returns the piece with a copy of its tensor, which may change at any time."""
    return TensorPiece(piece.name, piece.shape, piece.rectangle, torch.clone(piece.tensor.detach()))

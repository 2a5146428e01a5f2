"""Bytes that leave an asynchronous device beside its work, on one whose copies are drawn."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from sley_checkpoint.live_bytes import KeptMemory, LiveBytes
from sley_core.comm.copies import HostMemory
from sley_core.run_state.pieces import Rectangle, TensorPiece
from sley_testing.drawn_copies import DrawnDevice, DrawnStream


class Asynchronous(DrawnDevice):
    """Runs ahead of the host, as CUDA does."""

    @property
    def is_async(self) -> bool:
        return True


def pieces(*values: float) -> list[TensorPiece]:
    tensors = [torch.full((300,), value) for value in values]
    return [TensorPiece(f"{at}", (300,), Rectangle((0,), (300,)), one) for at, one in enumerate(tensors)]


def read(live: LiveBytes, piece: TensorPiece) -> float:
    """Reads a piece as the writing thread does; all of its numbers are one."""
    data = b"".join(bytes(chunk) for chunk in live.chunks(piece))
    (found,) = set(torch.frombuffer(bytearray(data), dtype=torch.float32).tolist())
    return float(found)


@pytest.mark.parametrize("order", range(12))
def test_what_is_read_is_what_was_there_when_the_save_began(order: int) -> None:
    """The update waits for the copies, and the writer for those that it reads; the second save takes the same memory."""
    device, memory = Asynchronous(order=order), KeptMemory()
    with device.watching():
        state = pieces(1.0, 2.0)
        for number in range(3):
            live = LiveBytes(state, device, memory)
            if order % 2:
                assert [read(live, piece) for piece in state] == [1.0 + number, 2.0 + number]
            live.stage()
            for piece in state:
                piece.tensor.add_(1.0)
            if not order % 2:
                assert [read(live, piece) for piece in state] == [1.0 + number, 2.0 + number]
        memory.free()


def test_pages_stay_locked_until_they_are_freed_and_are_locked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is unlocked while a copy is under way makes it wait for the host; a stream for each save would take those of
    exchanges, of which there are 32.
    """
    made: list[weakref.ref[HostMemory]] = []
    streams: list[DrawnStream] = []
    device, memory = Asynchronous(order=1), KeptMemory()
    host_memory, copy_stream = DrawnDevice.host_memory, DrawnDevice.copy_stream

    def host(self: DrawnDevice, num_bytes: int) -> HostMemory:
        found = host_memory(self, num_bytes)
        made.append(weakref.ref(found))
        return found

    def stream(self: DrawnDevice) -> DrawnStream:
        streams.append(copy_stream(self))
        return streams[-1]

    monkeypatch.setattr(DrawnDevice, "host_memory", host)
    monkeypatch.setattr(DrawnDevice, "copy_stream", stream)
    with device.watching():
        for values in ((1.0, 2.0), (1.0, 2.0), (1.0, 2.0, 3.0)):
            state = pieces(*values)
            live = LiveBytes(state, device, memory)
            gc.collect()
            assert made[-1]() is not None, "unlocked as soon as it was made"
            assert [read(live, piece) for piece in state] == list(values)
            live.stage()
        assert (len(made), len(streams)) == (2, 1), "only what is larger is locked anew"
        memory.free()
        del live
        gc.collect()
        assert all(one() is None for one in made)

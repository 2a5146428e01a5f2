"""Copies of a save leave an asynchronous device beside its work, on one whose copies are drawn."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from sley_checkpoint.writing import HostCopies
from sley_core.comm.copies import HostMemory
from sley_testing.drawn_copies import DrawnDevice, DrawnStream


class Asynchronous(DrawnDevice):
    """Runs ahead of the host, as CUDA does."""

    @property
    def is_async(self) -> bool:
        return True


@pytest.mark.parametrize("order", range(12))
def test_copies_have_the_values_of_their_beginning(order: int) -> None:
    """The update waits for the copies, and the writer too; the second save takes the same memory."""
    device = Asynchronous(order=order)
    host = HostCopies(device)
    with device.watching():
        tensors = [torch.full((300,), 1.0), torch.full((20, 30), 2.0).t()]
        for number in range(3):
            wanted = [tensor.clone() for tensor in tensors]
            copies, event = host.start(tensors)
            if order % 2:
                event.wait()
                assert all(map(torch.equal, copies, wanted)), number
            event.hold_device()
            for tensor in tensors:
                tensor.add_(1.0)
            event.wait()
            assert all(map(torch.equal, copies, wanted)), number
            assert all(copy.is_contiguous() for copy in copies)
        host.free()


def test_pages_stay_locked_until_they_are_freed_and_are_locked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is unlocked while a copy is under way makes it wait for the host; a stream for each save would take those of
    exchanges, of which there are 32.
    """
    made: list[weakref.ref[HostMemory]] = []
    streams: list[DrawnStream] = []
    device = Asynchronous(order=1)
    host_copies = HostCopies(device)
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
            tensors = [torch.full((300,), value) for value in values]
            copies, event = host_copies.start(tensors)
            gc.collect()
            assert made[-1]() is not None, "unlocked as soon as it was made"
            event.wait()
            assert [copy[0].item() for copy in copies] == list(values)
            event.hold_device()
        assert (len(made), len(streams)) == (2, 1), "only what is larger is locked anew"
        host_copies.free()
        del copies
        gc.collect()
        assert all(reference() is None for reference in made)

"""Tests that copies to and from the host on CUDA are ordered with the work of the device, as `comm/device.py` promises.

On the CPU, `sley_testing.drawn_copies` simulates these rules. These tests show that a device follows them.
"""

from threading import Thread

import pytest
import torch

from sley_core.comm.device import Device, HostMemory, free

pytestmark = pytest.mark.gpu

NUM_BYTES = 1 << 26
SLEEP_CYCLES = 50_000_000
"""A kernel of some 30 ms, which is longer than any copy here."""


@pytest.fixture
def device() -> Device:
    return Device.pick("cuda")


@pytest.fixture
def host(device: Device) -> torch.Tensor:
    memory = device.host_memory(NUM_BYTES)
    assert memory.is_locked
    return memory.data


def device_bytes(value: int) -> torch.Tensor:
    return torch.full((NUM_BYTES,), value, dtype=torch.uint8, device="cuda")


def test_a_copy_reads_what_earlier_work_wrote(device: Device, host: torch.Tensor) -> None:
    source, stream = device_bytes(1), device.copy_stream()
    torch.cuda._sleep(SLEEP_CYCLES)
    source.fill_(2)
    stream.wait_for_device()
    stream.copy(host, source)
    event = stream.record()
    assert not event.is_done()
    event.wait()
    assert (host == 2).all()


def test_work_that_is_held_reads_what_a_copy_wrote(device: Device, host: torch.Tensor) -> None:
    target, stream = device_bytes(1), device.copy_stream()
    host.fill_(2)
    torch.cuda._sleep(SLEEP_CYCLES)
    stream.wait_for_device()  # so the copy is as late as the sleep
    stream.copy(target, host)
    stream.record().make_device_wait()
    assert (target == 2).all()


def test_freed_memory_is_not_reused_while_a_copy_reads_it(device: Device, host: torch.Tensor) -> None:
    """The allocator gives the memory of `source` to `reused` at once."""
    torch.cuda.empty_cache()
    source, stream = device_bytes(1), device.copy_stream()
    torch.cuda._sleep(SLEEP_CYCLES)
    stream.wait_for_device()
    stream.copy(host, source)
    event = stream.record()
    event.make_device_wait()
    address = source.data_ptr()
    free(source)
    reused = device_bytes(2)
    assert reused.data_ptr() == address
    event.wait()
    assert (host == 1).all()


def test_a_copy_waits_for_the_event_of_another_stream(device: Device, host: torch.Tensor) -> None:
    source, target, out, into = device_bytes(2), device_bytes(1), device.copy_stream(), device.copy_stream()
    torch.cuda._sleep(SLEEP_CYCLES)
    out.wait_for_device()
    out.copy(host, source)
    into.wait_for(out.record())
    into.copy(target, host)
    into.record().wait()
    assert (target == 2).all()


def test_another_thread_waits_for_an_event(device: Device, host: torch.Tensor) -> None:
    source, stream = device_bytes(1), device.copy_stream()
    torch.cuda._sleep(SLEEP_CYCLES)
    stream.wait_for_device()
    stream.copy(host, source)
    event, results = stream.record(), []
    thread = Thread(target=lambda: results.append((event.wait(), event.is_done(), bool((host == 1).all()))))
    thread.start()
    thread.join()
    assert results == [(None, True, True)]


def test_memory_that_cannot_be_locked_is_a_warning_and_leaves_no_error(device: Device) -> None:
    memory = HostMemory(1 << 20, lock=True)
    with pytest.warns(RuntimeWarning, match="could not be pinned"):
        assert not memory._lock(memory.data.data_ptr())  # its pages are locked already
    assert torch.ones(1, device="cuda").add_(1).item() == 2

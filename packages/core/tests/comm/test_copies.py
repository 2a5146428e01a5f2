"""Memory that is freed and comes back under all its views, and host memory of an exact size."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from sley_core.comm.copies import CudaStream, HostMemory, HostStream, _CudaEvent, free, grow, make_room
from sley_core.comm.device import CONNECTIONS, Device


def test_views_hooks_and_gradients_survive_memory_that_leaves() -> None:
    """A parameter that is a view of the freed memory keeps its hooks, its graph node and its place."""
    whole = torch.arange(8.0)
    parameter = torch.nn.Parameter(whole[2:6])
    seen: list[float] = []
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.sum())))
    num_bytes = free(whole)
    assert (num_bytes, whole.untyped_storage().nbytes(), parameter.untyped_storage().nbytes()) == (32, 0, 0)
    assert parameter.shape == (4,)
    grow(parameter, num_bytes)
    whole.copy_(torch.arange(8.0))
    (parameter * 2).sum().backward()
    assert parameter.tolist() == [2, 3, 4, 5]
    assert seen == [8.0]


def test_host_memory_takes_whole_pages_and_no_more() -> None:
    """The tensor outlives the object that made it."""
    memory = Device(torch.device("cpu")).host_memory(3 * mmap.PAGESIZE + 1)
    assert (memory.num_bytes, memory.is_locked) == (4 * mmap.PAGESIZE, False)
    data = memory.data
    assert data.shape == (3 * mmap.PAGESIZE + 1,)
    assert data.data_ptr() % mmap.PAGESIZE == 0
    assert not data.any()
    del memory
    gc.collect()
    data.fill_(7)
    assert int(data.sum()) == 7 * data.numel()


def test_nothing_is_a_page_too() -> None:
    assert HostMemory(0, lock=False).data.shape == (0,)


def test_memory_that_the_system_does_not_lock_is_pageable_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where `ulimit -l` is reached: slower copies, the same bytes, and nothing to unlock in the end."""
    unlocked: list[int] = []
    for error, is_locked in ((2, False), (0, True)):
        runtime = SimpleNamespace(cudaHostRegister=lambda *_: error, cudaHostUnregister=unlocked.append)  # noqa: B023
        monkeypatch.setattr(torch.cuda, "cudart", lambda runtime=runtime: runtime)
        monkeypatch.setattr("sley_core.comm.copies._forget_error", lambda: None)  # no kernel can be started here
        told = nullcontext() if is_locked else pytest.warns(RuntimeWarning, match="could not be page-locked .CUDA error 2.")
        with told:
            memory = HostMemory(5000, lock=True)
        assert memory.is_locked is is_locked
        memory.data.fill_(3)
        assert int(memory.data.sum()) == 15_000
        address = memory.data.data_ptr()
        del memory
        gc.collect()
        assert unlocked == [address] * is_locked


def test_a_copy_of_the_host_is_done_at_once() -> None:
    """Also of a leaf that autograd watches."""
    stream = HostStream()
    target = torch.nn.Parameter(torch.zeros(2))
    stream.follow()
    stream.copy(target, torch.ones(2))
    event = stream.record()
    assert event.is_done()
    stream.after(event)
    event.hold_device()
    assert target.tolist() == [1, 1]


class Stream:
    """In place of torch.cuda.Stream; says what it was told."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.said: list[object] = []

    def wait_event(self, event: object) -> None:
        self.said.append(("waits for", event))

    def wait_stream(self, stream: object) -> None:
        self.said.append(("waits for", stream))

    def record_event(self) -> object:
        self.said.append("recorded")
        return "event"


class Cuda:
    """In place of what of torch.cuda a copy asks; says what was asked. current: the device of this thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: int = 0) -> None:
        self.current = torch.device("cuda", 0)
        self.said: list[object] = []
        self.error = error
        for name in ("device", "cudart"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device
        yield
        self.current = before

    def synchronize(self) -> None:
        self.said.append(("waited on", self.current))

    def query(self) -> bool:
        self.said.append(("asked on", self.current))
        return True

    def cudart(self) -> Cuda:
        return self

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # CUDA's name
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # CUDA's name
        self.said.append("unlocked")
        return 0


def test_an_event_is_of_its_own_device_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that saves, or collects garbage, has device 0 as its current one."""
    cuda, own = Cuda(monkeypatch), torch.device("cuda", 3)
    main = Stream(own)
    event = _CudaEvent(cuda, main)  # type: ignore[arg-type]
    assert event.is_done()
    event.wait()
    event.hold_device()
    assert cuda.said == [("asked on", own), ("waited on", own)]
    assert main.said == [("waits for", cuda)]


def test_copies_are_in_order_with_the_run_and_not_with_whoever_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may call on a stream of its own, and Python may collect what was copied on any thread."""
    made: list[Stream] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(Stream(device)) or made[-1])
    monkeypatch.setattr(torch.cuda, "current_stream", None)  # it is not asked
    main = Stream(torch.device("cuda", 3))
    stream = CudaStream(main)  # type: ignore[arg-type]
    stream.follow()
    stream.record().hold_device()
    assert made[0].device == main.device
    assert made[0].said == [("waits for", main), "recorded"]
    assert main.said == [("waits for", "event")]


def test_a_call_from_another_stream_is_in_order_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    own, others = Stream(torch.device("cuda", 0)), Stream(torch.device("cuda", 0))
    current = [others]
    device = Device(own.device, stream=own)  # type: ignore[arg-type]

    @contextmanager
    def stream(one: Stream) -> Iterator[None]:
        current.append(one)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    with device.on_stream():
        assert (current[-1], own.said, others.said) == (own, [("waits for", others)], [])
        with device.on_stream():  # it is the current one
            assert len(current) == 2
    assert (current, others.said) == ([others], [("waits for", own)])


def test_a_refusal_to_lock_pages_is_a_warning_and_no_error_of_what_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA keeps the error until somebody asks, and torch asks behind every kernel."""
    Cuda(monkeypatch, error=2)
    asked: list[str] = []

    def zeros(*size: int, device: str) -> torch.Tensor:
        asked.append(device)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.warns(RuntimeWarning, match="could not be page-locked"):
        memory = HostMemory(10, lock=True)
    assert (memory.is_locked, asked) == (False, ["cuda"])


def test_pages_are_locked_as_long_as_their_object_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    memory = HostMemory(10, lock=True)
    data = memory.data
    assert (memory.is_locked, cuda.said) == (True, [])
    del memory
    gc.collect()
    assert cuda.said == ["unlocked"]
    assert not data.any()


MIB = 1 << 20


@pytest.mark.parametrize(
    ("sizes", "kept", "taken"),
    [
        ([3 * MIB, 1, 2 * MIB + 1, MIB], 4 * MIB, [5 * MIB + 512]),  # small ones share memory anyway
        ([3 * MIB, 2 * MIB], 5 * MIB, []),  # there is as much
        ([3 * MIB, 2 * MIB], 0, [5 * MIB]),
        ([3 * MIB], 0, []),  # one piece as it is
        ([], 0, []),
    ],
)
def test_memory_for_many_tensors_is_taken_at_once(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], kept: int, taken: list[int]
) -> None:
    asked: list[int] = []

    def empty(num_bytes: int, **_kind: object) -> None:
        asked.append(num_bytes)
        raise torch.OutOfMemoryError  # the driver has not as much in one piece

    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 7 * MIB + kept)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 7 * MIB)
    monkeypatch.setattr(torch, "empty", empty)
    make_room(sizes, torch.device("cuda", 1))
    assert asked == taken
    make_room(sizes, torch.device("cpu"))
    assert asked == taken


@pytest.mark.parametrize("given", [None, "1", "8"])
def test_streams_have_queues_of_their_own_unless_a_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    monkeypatch.delenv(CONNECTIONS, raising=False)
    if given is not None:
        monkeypatch.setenv(CONNECTIONS, given)
    for name, value in (("is_available", lambda: True), ("device_count", lambda: 1), ("current_stream", Stream)):
        monkeypatch.setattr(torch.cuda, name, value)
    set_with: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: set_with.append(os.environ[CONNECTIONS]))
    monkeypatch.setattr("sley_core.comm.device._begin_backwards", lambda device: None)
    assert Device.pick("cuda").stream is not None
    assert set_with == [given or "32"]
    monkeypatch.delenv(CONNECTIONS, raising=False)  # not this test's to leave

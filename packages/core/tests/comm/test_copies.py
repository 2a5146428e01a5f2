"""Memory that is freed and comes back under all its views, and host memory of an exact size."""

from __future__ import annotations

import gc
import mmap
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from sley_core.comm.copies import HostMemory, HostStream, free, grow
from sley_core.comm.device import Device


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
        told = (
            nullcontext()
            if is_locked
            else pytest.warns(RuntimeWarning, match="could not be page-locked .CUDA error 2.")
        )
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

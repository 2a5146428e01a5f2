"""Memory that is freed and comes back under all its views, and host memory of an exact size."""

from __future__ import annotations

import gc
import mmap

import pytest
import torch

from sley_core.comm.copies import HostMemory, free, grow
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


class Runtime:
    """In place of CUDA's: locks any memory."""

    is_unlocked = False

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # CUDA's name
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # CUDA's name
        self.is_unlocked = True
        return 0


def test_pages_are_locked_as_long_as_their_object_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = HostMemory(10, lock=True)
    data = memory.data
    assert (memory.is_locked, runtime.is_unlocked) == (True, False)
    del memory
    gc.collect()
    assert runtime.is_unlocked
    assert not data.any()

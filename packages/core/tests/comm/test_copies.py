"""Memory that is freed and comes back under all its views, and host memory of an exact size."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

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


def test_pages_are_locked_as_long_as_their_object_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    memory = HostMemory(10, lock=True)
    data = memory.data
    assert (memory.is_locked, cuda.said) == (True, [])
    del memory
    gc.collect()
    assert cuda.said == ["unlocked"]
    assert not data.any()

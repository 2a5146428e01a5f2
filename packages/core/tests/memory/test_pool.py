"""Blocks of a pool are shared by buffers of almost the same size, never lent twice, and counted; freed memory comes back under
all its views; host memory has an exact size.
"""

from __future__ import annotations

import gc
import mmap
from contextlib import ExitStack
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sley_core.comm.copies import HostMemory, free, grow
from sley_core.comm.device import Device
from sley_core.memory.pool import DevicePool, block_bytes

CPU = torch.device("cpu")


@given(st.integers(0, 2**44), st.sampled_from([1, 2, 4, 8, 16]))
def test_a_block_holds_the_request_and_little_more(num_bytes: int, per_doubling: int) -> None:
    size = block_bytes(num_bytes, per_doubling)
    assert size >= num_bytes
    assert size % 256 == 0
    assert size - num_bytes <= num_bytes / per_doubling + 256
    assert block_bytes(size, per_doubling) == size, "a block's own size would be lent from a larger one"


def test_there_are_few_sizes() -> None:
    """8 per doubling: 10 doublings from 2 KiB to 2 MiB."""
    sizes = {block_bytes(num_bytes) for num_bytes in range(2049, 2**21, 64)}
    assert len(sizes) == 80
    assert all(high / low <= 1.125 for low, high in pairwise(sorted(sizes)))


def test_other_shapes_and_dtypes_of_almost_the_same_size_share_a_block() -> None:
    pool = DevicePool()
    for shape, dtype in [((60, 100), torch.float32), ((24_100,), torch.uint8), ((100, 120), torch.bfloat16), ((), torch.int64)]:
        for _ in range(2):
            with pool.lease(shape, dtype, CPU) as buffer:
                assert (buffer.shape, buffer.dtype, buffer.is_contiguous()) == (shape, dtype, True)
                assert buffer.data_ptr() % 256 == 0
        with pool.lease(shape, dtype, CPU) as again:
            assert again is buffer, "users cache by the tensor"
    assert pool.num_allocations == 2, "one for about 24,000 bytes, and one for 8"


def test_counts_say_what_is_lent_held_and_wasted() -> None:
    pool = DevicePool(per_doubling=1)
    for _ in range(4):
        with pool.lease((5000,), torch.uint8, CPU):
            counts = pool.counts()
            assert (counts["lent_bytes"], counts["held_bytes"], counts["wasted_bytes"]) == (5000, 8448, 3448)
    counts = pool.counts()
    assert (counts["allocations"], counts["leases"], counts["hit_rate"]) == (1, 4, 0.75)
    assert (counts["lent_bytes"], counts["max_held_bytes"], counts["wasted_bytes"]) == (0, 8448, 0)


def test_a_lease_is_used_once() -> None:
    """A second `with` would hand out a buffer that may be lent to another user by then."""
    lease = DevicePool().lease((8,), torch.float32, CPU)
    with pytest.raises(AssertionError, match="before it began"):
        lease.__exit__(None, None, None)
    with lease, pytest.raises(AssertionError, match="used twice"), lease:
        pass
    with pytest.raises(AssertionError, match="used twice"), lease:
        pass


def test_a_buffer_whose_lease_is_lost_is_not_lent_again_and_not_kept() -> None:
    """A failed step forgets what it was receiving; gloo may still write there."""
    pool = DevicePool()
    lost = pool.lease((8,), torch.float32, CPU).__enter__()
    gc.collect()
    with ExitStack() as stack:
        buffers = [stack.enter_context(pool.lease((8,), torch.float32, CPU)) for _ in range(3)]
        assert len({buffer.data_ptr() for buffer in [lost, *buffers]}) == 4
        assert pool.num_lent == 3
    assert (pool.num_lent, pool.num_bytes, len(list(pool.named_tensors()))) == (0, 3 * 512, 3)


def test_many_sizes_take_twice_the_peak_at_most() -> None:
    """With sequences of many lengths the pool stops growing: it lends larger blocks, and frees old ones."""
    pool = DevicePool()
    with pool.lease((100_000,), torch.uint8, CPU), pool.lease((100_000,), torch.uint8, CPU):
        pass
    for size in range(99_000, 1000, -1000):
        with pool.lease((size,), torch.uint8, CPU), pool.lease((2 * size,), torch.uint8, CPU) as buffer:
            assert buffer.shape == (2 * size,)
        assert pool.num_bytes <= 2 * (106_752 + 213_248)
    assert pool.num_allocations <= 6


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

"""Blocks are shared by what has almost the same size, never lent twice, and counted."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sley_memory.config import SizeClassesConfig
from sley_memory.size_classes import SizeClasses, class_bytes

CPU = torch.device("cpu")


def pool(**options: int) -> SizeClasses:
    return SizeClasses(SizeClassesConfig.model_validate(options))


@given(st.integers(0, 2**44), st.sampled_from([1, 2, 4, 8, 16]))
def test_a_block_holds_what_was_asked_for_and_little_more(num_bytes: int, per_doubling: int) -> None:
    size = class_bytes(num_bytes, per_doubling)
    assert size >= num_bytes
    assert size % 256 == 0
    assert size - num_bytes <= num_bytes / per_doubling + 256
    assert class_bytes(size, per_doubling) == size, "a block's own size would be lent from a larger one"


def test_there_are_few_sizes() -> None:
    """8 per doubling: 20 doublings from 2 KiB to 2 GiB."""
    sizes = {class_bytes(num_bytes) for num_bytes in range(2049, 2**21, 64)}
    assert len(sizes) == 80
    assert all(high / low <= 1.125 for low, high in pairwise(sorted(sizes)))


def test_other_shapes_and_dtypes_of_almost_the_same_size_share_a_block() -> None:
    shared = pool()
    for shape, dtype in [((60, 100), torch.float32), ((24_100,), torch.uint8), ((100, 120), torch.bfloat16), ((), torch.int64)]:
        with shared.lease(shape, dtype, CPU) as buffer:
            assert (buffer.shape, buffer.dtype, buffer.is_contiguous()) == (shape, dtype, True)
            assert buffer.data_ptr() % 256 == 0
    assert shared.num_allocations == 2, "one for about 24,000 bytes, and one for 8"


def test_two_leases_never_share() -> None:
    shared = pool()
    with ExitStack() as stack:
        buffers = [stack.enter_context(shared.lease((n,), torch.uint8, CPU)) for n in (100, 0, 256, 200)]
        for number, buffer in enumerate(buffers):
            buffer.fill_(number)
        assert [buffer.unique().tolist() for buffer in buffers] == [[0], [], [2], [3]]
        assert (shared.num_lent, shared.num_bytes_lent) == (4, 556)
    assert (shared.num_lent, shared.max_lent, shared.num_allocations, shared.num_bytes_lent) == (0, 4, 4, 0)


def test_counts_say_what_is_lent_held_and_wasted() -> None:
    shared = pool(per_doubling=1)
    for _ in range(4):
        with shared.lease((5000,), torch.uint8, CPU):
            counts = shared.counts()
            assert counts["lent_bytes"] == 5000
            assert counts["held_bytes"] == 8192 + 256
            assert counts["wasted_bytes"] == 8192 + 256 - 5000
    counts = shared.counts()
    assert (counts["allocations"], counts["leases"], counts["hit_rate"]) == (1, 4, 0.75)
    assert (counts["lent_bytes"], counts["max_lent_bytes"], counts["wasted_bytes"]) == (0, 5000, 0)


def test_trim_frees_what_is_not_lent() -> None:
    shared = pool()
    with shared.lease((1000,), torch.uint8, CPU):
        with shared.lease((1000,), torch.uint8, CPU):
            assert len(list(shared.held())) == 2
        assert shared.trim() == 1024 + 256
        assert [name for name, _ in shared.held()] == ["lent.0"]
    assert shared.trim() == 1024 + 256
    assert (shared.trim(), shared.num_bytes, list(shared.held())) == (0, 0, [])


def test_a_lease_is_used_once() -> None:
    """A second `with` would hand out what may be somebody else's by then."""
    lease = pool().lease((8,), torch.float32, CPU)
    with pytest.raises(AssertionError, match="before it began"):
        lease.__exit__(None, None, None)
    with lease, pytest.raises(AssertionError, match="used twice"), lease:
        pass
    with pytest.raises(AssertionError, match="used twice"), lease:
        pass


def test_a_buffer_of_inference_is_as_good_as_any() -> None:
    with torch.inference_mode(), pool().lease((8,), torch.float32, CPU) as buffer:
        assert not buffer.is_inference()


def test_what_is_lost_is_nobody_elses() -> None:
    """Whoever loses a lease may still have its buffer."""
    shared = pool()
    kept = [shared.lease((8,), torch.float32, CPU).__enter__() for _ in range(20)]
    assert len({buffer.data_ptr() for buffer in kept}) == shared.num_lent == 20

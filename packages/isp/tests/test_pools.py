"""Leases never overlap, buffers persist, and the counters tell."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest
import torch

from sley_isp import pools
from sley_isp.config import FreshConfig, SlotsConfig
from sley_isp.pools import Fresh, Slots

CPU = torch.device("cpu")


def test_a_buffer_that_came_back_is_lent_again():
    pool = Slots(SlotsConfig())
    with pool.lease((4, 2), torch.float32, CPU) as first:
        address = first.data_ptr()
    with pool.lease((4, 2), torch.float32, CPU) as second:
        assert second.data_ptr() == address
    assert (pool.num_allocations, pool.max_lent, pool.num_lent, pool.num_bytes) == (1, 1, 0, 32)


@pytest.mark.parametrize("kind", [Slots, Fresh])
def test_two_leases_never_share(kind):
    pool = kind(SlotsConfig())
    with ExitStack() as stack:
        buffers = [stack.enter_context(pool.lease((8,), torch.float64, CPU)) for _ in range(3)]
        assert len({buffer.data_ptr() for buffer in buffers}) == 3
    assert (pool.num_lent, pool.max_lent, pool.num_allocations) == (0, 3, 3)


def test_shape_dtype_and_device_keep_buffers_apart():
    """A pool in which the first shape wins would lend buffers of the wrong size where layers differ."""
    pool = Slots(SlotsConfig())
    sizes = [((8,), torch.float32), ((2, 4), torch.float32), ((8,), torch.bfloat16)]
    for _ in range(2):
        for shape, dtype in sizes:
            with pool.lease(shape, dtype, CPU) as buffer:
                assert (tuple(buffer.shape), buffer.dtype) == (shape, dtype)
    assert pool.num_allocations == 3


def test_a_lease_is_used_once():
    """A second `with` would hand out what may be somebody else's by then."""
    pool = Slots(SlotsConfig())
    lease = pool.lease((8,), torch.float32, CPU)
    with lease, pytest.raises(AssertionError, match="used twice"), lease:
        pass
    with pytest.raises(AssertionError, match="used twice"), lease:
        pass
    assert pool.num_lent == 0


def without_assertions(module):
    """The module as `python -O` compiles it; an interpreter of that kind would compile all of torch."""
    again = ModuleType(module.__name__)
    exec(compile(Path(module.__file__).read_text("utf-8"), module.__file__, "exec", optimize=1), again.__dict__)
    return again


def test_a_lease_that_is_used_twice_without_assertions():
    """Under `python -O`: another buffer, one warning, and all come back."""
    pool = without_assertions(pools).Slots(SlotsConfig())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            lease = pool.lease((8,), torch.float32, CPU)
            with lease as first, lease as second, lease as third:
                assert len({first.data_ptr(), second.data_ptr(), third.data_ptr()}) == pool.num_lent == 3
    (said,) = caught
    assert "is used twice" in str(said.message)
    assert (pool.num_lent, pool.num_allocations) == (0, 3)


def test_a_buffer_of_inference_is_as_good_as_any():
    """A model called under `torch.inference_mode` may be the first to ask; training writes into the same buffer."""
    pool = Slots(SlotsConfig())
    with torch.inference_mode(), pool.lease((8,), torch.float32, CPU) as buffer:
        assert not buffer.is_inference()


def test_a_buffer_that_is_lost_is_nobody_elses():
    """Whoever loses a lease with its buffer: no other tensor is taken for it."""
    pool = Slots(SlotsConfig())
    for _ in range(20):
        pool.lease((8,), torch.float32, CPU).__enter__()
    assert len({id(buffer) for buffer in pool._lent.values()}) == pool.num_lent == 20


def test_a_lease_that_never_began_does_not_end():
    with pytest.raises(AssertionError, match="before it began"):
        Slots(SlotsConfig()).lease((8,), torch.float32, CPU).__exit__(None, None, None)


def test_trim_frees_what_is_not_lent():
    pool = Slots(SlotsConfig())
    with pool.lease((8,), torch.float32, CPU):
        with pool.lease((8,), torch.float32, CPU):
            assert [name for name, _ in pool.held()] == ["lent.0", "lent.1"]
        assert [(name, tensor.nbytes) for name, tensor in pool.held()] == [("lent.0", 32), ("free.0", 32)]
        assert pool.trim() == 32
        assert pool.num_bytes == 32
    assert pool.trim() == 32
    assert pool.trim() == 0


def test_fresh_keeps_nothing():
    pool = Fresh(FreshConfig())
    for _ in range(2):
        with pool.lease((8,), torch.float32, CPU):
            pass
    assert (pool.num_allocations, pool.num_bytes, pool.trim()) == (2, 0, 0)

"""Defines the tests that every memory pool must pass; a plugin's tests inherit them.

    class TestSlabs(MemoryPoolContract):
        pool = {"use": "slabs.pool"}

The tests run in this process on the CPU. They lease buffers of several shapes and dtypes at the same time, fill them, and
return them in random order.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, suppress
from random import Random
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sley_core.comm.copies import storage_id
from sley_core.plan.load import plan_from_dict
from sley_core.protocols import MemoryPool
from sley_testing.plans import small_plan
from sley_testing.runs import counts_of

Size = tuple[tuple[int, ...], torch.dtype]
Lease = AbstractContextManager[Tensor]

CPU = torch.device("cpu")
SIZES: tuple[Size, ...] = (
    ((), torch.float32),
    ((0,), torch.float32),
    ((3, 5), torch.float32),
    ((15,), torch.float32),
    ((5, 3), torch.bfloat16),
    ((30,), torch.bfloat16),
    ((7, 2, 2), torch.int64),
    ((1000,), torch.uint8),
    ((125,), torch.float64),
)
"""Buffer shapes and dtypes. Some have equal bytes or equal numbers of elements, which a pool must not confuse."""


class MemoryPoolContract:
    """Tests a memory pool: inherit and set `pool` to a table `[pool]`. num_draws: the number of random calls."""

    pool: ClassVar[dict[str, Any]]
    num_draws: ClassVar[int] = 300

    def test_buffer_matches_request(self) -> None:
        """Expects the requested shape, dtype and device, and a contiguous tensor that is usable in training."""
        pool = self._new_pool()
        for _ in range(2):  # the second time from cached memory
            for shape, dtype in SIZES:
                with torch.inference_mode(), pool.lease(shape, dtype, CPU) as buffer:
                    actual = tuple(buffer.shape), buffer.dtype, buffer.device
                    assert actual == (shape, dtype, CPU), f"requested {shape} {dtype}, but leased {actual}"
                    assert buffer.is_contiguous(), f"the buffer of {shape} {dtype} is not contiguous"
                    assert not buffer.is_inference(), f"the buffer of {shape} {dtype} cannot be used in training"
                    assert not buffer.requires_grad, f"the buffer of {shape} {dtype} requires a gradient"

    def test_leased_buffer_has_one_user(self) -> None:
        """Leases and returns buffers in random order, and checks their contents."""
        pool, generator = self._new_pool(), Random(7)
        leases: list[tuple[int, Size, Lease, Tensor]] = []
        for number in range(self.num_draws):
            if leases and (len(leases) == 12 or generator.random() < 0.45):
                fill_value, size, lease, buffer = leases.pop(generator.randrange(len(leases)))
                assert _is_filled(buffer, fill_value), f"the buffer of {size} was leased twice at the same time"
                lease.__exit__(None, None, None)
                continue
            size, fill_value = generator.choice(SIZES), number % 251
            lease = pool.lease(*size, CPU)
            leases.append((fill_value, size, lease, _fill(lease.__enter__(), fill_value)))
        for fill_value, size, lease, buffer in leases:
            assert _is_filled(buffer, fill_value), f"the buffer of {size} was leased twice at the same time"
            lease.__exit__(None, None, None)

    def test_ended_lease_cannot_alias_another_buffer(self) -> None:
        """Expects that a second `with` of a lease is refused or gets an unused buffer."""
        pool = self._new_pool()
        lease = pool.lease((64,), torch.float32, CPU)
        with lease:
            pass
        with pool.lease((64,), torch.float32, CPU) as leased:
            _fill(leased, 1)
            try:
                with lease as buffer:
                    _fill(buffer, 2)
            except Exception:  # any refusal is accepted
                pass
            assert _is_filled(leased, 1), "a lease that is used twice returns a buffer of another lease"

    def test_memory_does_not_grow(self) -> None:
        """Repeats the same leases, including blocks that raise."""
        pool = self._new_pool()
        sizes = []
        for _ in range(4):
            self._lease_all_sizes(pool)
            sizes.append(_num_bytes(pool))
        assert sizes[-1] == sizes[0], f"the pool holds {sizes} bytes after each of four identical rounds of leases"

    def test_trim_frees_only_unleased_memory(self) -> None:
        """Expects that `trim` keeps leased buffers and returns the number of freed bytes."""
        pool = self._new_pool()
        self._lease_all_sizes(pool)
        with pool.lease((100,), torch.float32, CPU) as leased:
            _fill(leased, 9)
            storages_before, leased_id = _storages(pool), storage_id(leased)
            reported = pool.trim()
            freed = sum(storages_before.values()) - _num_bytes(pool)
            assert reported == freed, f"trim reports {reported} freed bytes, but the pool holds {freed} bytes less"
            has_memory = (
                leased.untyped_storage().nbytes() >= leased.nbytes
            )  # a variable, since pytest prints the operands of an assert
            assert has_memory, "trim freed the memory of a leased buffer"
            assert _is_filled(leased, 9), "trim changed a leased buffer"
            assert leased_id in _storages(pool), "`named_tensors` lacks a leased buffer after trim"
        pool.trim()
        assert not _num_bytes(pool), f"without leases, the pool still holds {_num_bytes(pool)} bytes after trim"

    def test_trimmed_memory_is_released(self) -> None:
        """Expects that no reference keeps trimmed memory alive."""
        pool = self._new_pool()
        references = []
        for shape, dtype in SIZES:
            with pool.lease(shape, dtype, CPU) as buffer:
                references.append(StorageWeakRef(buffer.untyped_storage()))  # type: ignore[no-untyped-call]
        del buffer
        pool.trim()
        num_alive = sum(not reference.expired() for reference in references)  # type: ignore[no-untyped-call]
        assert not num_alive, f"after trim {num_alive} of {len(references)} buffers still have their memory"

    def test_held_includes_leased_buffers(self) -> None:
        """Checks `named_tensors`, which memory reports and offload managers use to find a run's memory."""
        pool = self._new_pool()
        with ExitStack() as leases:
            for shape, dtype in SIZES:
                buffer = leases.enter_context(pool.lease(shape, dtype, CPU))
                is_reported = storage_id(buffer) in _storages(pool)
                assert is_reported or not buffer.numel(), f"`named_tensors` lacks the leased buffer of {shape} {dtype}"
            names = [name for name, _ in pool.named_tensors()]
            assert len(set(names)) == len(names), f"`named_tensors` has duplicate names: {names}"

    def test_counts_are_numbers(self) -> None:
        """Expects finite counts that do not change between calls."""
        pool = self._new_pool()
        self._lease_all_sizes(pool)
        counts_of(pool)

    def _new_pool(self) -> MemoryPool:
        """Returns a new pool."""
        component = plan_from_dict(small_plan(pool=self.pool)).pool
        assert component is not None
        pool: MemoryPool = component.build()
        return pool

    def _lease_all_sizes(self, pool: MemoryPool) -> None:
        """Leases a buffer of each size at the same time, and returns them by an error."""
        with suppress(_BlockError), ExitStack() as leases:
            for size in SIZES:
                leases.enter_context(pool.lease(*size, CPU))
            raise _BlockError


class _BlockError(Exception):
    """Ends a block of leases."""


def _fill(buffer: Tensor, fill_value: int) -> Tensor:
    _bytes(buffer).fill_(fill_value)
    return buffer


def _is_filled(buffer: Tensor, fill_value: int) -> bool:
    return bool((_bytes(buffer) == fill_value).all())


def _bytes(buffer: Tensor) -> Tensor:
    """Returns a uint8 view [bytes] of the buffer."""
    return buffer.detach().reshape(-1).view(torch.uint8)


def _storages(pool: MemoryPool) -> dict[int, int]:
    """Returns the bytes of each storage of the pool, by storage id."""
    return {storage_id(tensor): tensor.untyped_storage().nbytes() for _, tensor in pool.named_tensors()}


def _num_bytes(pool: MemoryPool) -> int:
    return sum(_storages(pool).values())

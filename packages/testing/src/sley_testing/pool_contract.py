"""Tests what every memory pool must pass; the tests of a plugin inherit them.

    class TestSlabs(MemoryPoolContract):
        pool = {"use": "slabs.pool"}

The tests run in this process, on the CPU: buffers of several shapes and dtypes are lent at the same time, filled, and returned
in random orders.
"""

from __future__ import annotations

from collections.abc import Sequence
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
"""Some of equal bytes or equal elements, which a pool must not take for one another."""


class MemoryPoolContract:
    """Tests a memory pool: inherit and set `pool` to a table of `[pools.NAME]`. num_draws: leases and returns of a test."""

    pool: ClassVar[dict[str, Any]]
    num_draws: ClassVar[int] = 300

    def test_buffer_matches_request(self) -> None:
        """Shape, dtype, device; contiguous, and usable in training even where it was lent in inference mode."""
        pool = self._pool()
        for _ in range(2):  # the second time from what the pool has kept
            for shape, dtype in SIZES:
                with torch.inference_mode(), pool.lease(shape, dtype, CPU) as buffer:
                    found = tuple(buffer.shape), buffer.dtype, buffer.device
                    assert found == (shape, dtype, CPU), f"asked for {shape} {dtype}, lent {found}"
                    assert buffer.is_contiguous(), f"the buffer of {shape} {dtype} is not contiguous"
                    assert not buffer.is_inference(), f"the buffer of {shape} {dtype} cannot be used in training"
                    assert not buffer.requires_grad, f"the buffer of {shape} {dtype} requires a gradient"

    def test_leased_buffer_has_one_user(self) -> None:
        """Whatever is lent and returned meanwhile, in any order."""
        pool, draw = self._pool(), Random(7)
        held: list[tuple[int, Size, Lease, Tensor]] = []
        for number in range(self.num_draws):
            if held and (len(held) == 12 or draw.random() < 0.45):
                mark, size, lease, buffer = held.pop(draw.randrange(len(held)))
                assert _is_filled(buffer, mark), f"the buffer of {size} was lent to someone else before it was given back"
                lease.__exit__(None, None, None)
                continue
            size, mark = draw.choice(SIZES), number % 251
            lease = pool.lease(*size, CPU)
            held.append((mark, size, lease, _filled(lease.__enter__(), mark)))
        for mark, size, lease, buffer in held:
            assert _is_filled(buffer, mark), f"the buffer of {size} was lent to someone else before it was given back"
            lease.__exit__(None, None, None)

    def test_ended_lease_cannot_alias_another_buffer(self) -> None:
        """A second `with` of one lease is refused, or gets a buffer that nothing else has."""
        pool = self._pool()
        lease = pool.lease((64,), torch.float32, CPU)
        with lease:
            pass
        with pool.lease((64,), torch.float32, CPU) as other:
            _filled(other, 1)
            try:
                with lease as again:
                    _filled(again, 2)
            except Exception:  # any refusal will do
                pass
            assert _is_filled(other, 1), "a lease that is used twice gives a buffer that is lent to someone else"

    def test_memory_does_not_grow(self) -> None:
        """The same leases again need no more memory, also where a block within one failed."""
        pool = self._pool()
        after = []
        for _ in range(4):
            self._lend_all(pool)
            after.append(_num_bytes(pool))
        assert after[-1] == after[0], f"the same leases, four times: the pool holds {after} bytes after each"

    def test_trim_frees_only_unleased_memory(self) -> None:
        """It frees nothing else, and returns the number of bytes freed."""
        pool = self._pool()
        self._lend_all(pool)
        with pool.lease((100,), torch.float32, CPU) as lent:
            _filled(lent, 9)
            before, own = _storages(pool), storage_id(lent)
            told = pool.trim()
            freed = sum(before.values()) - _num_bytes(pool)
            assert told == freed, f"trim says that it freed {told} bytes, and the pool holds {freed} less"
            has_memory = lent.untyped_storage().nbytes() >= lent.nbytes  # pytest prints what stands in an assert
            assert has_memory, "trim freed the memory of a buffer that is lent"
            assert _is_filled(lent, 9), "trim changed a buffer that is lent"
            assert own in _storages(pool), "trim made the pool forget a buffer that is lent"
        pool.trim()
        assert not _num_bytes(pool), f"nothing is lent, and after trim the pool holds {_num_bytes(pool)} bytes"

    def test_trimmed_memory_is_released(self) -> None:
        """Nothing keeps the memory once the pool reports it as freed."""
        pool = self._pool()
        references = []
        for shape, dtype in SIZES:
            with pool.lease(shape, dtype, CPU) as buffer:
                references.append(StorageWeakRef(buffer.untyped_storage()))  # type: ignore[no-untyped-call]  # torch's
        del buffer
        pool.trim()
        kept = sum(not reference.expired() for reference in references)  # type: ignore[no-untyped-call]  # torch's
        assert not kept, f"after trim {kept} of {len(references)} buffers still have their memory"

    def test_held_includes_leased_buffers(self) -> None:
        """`held` includes what is lent: reports and offload managers use it to find a run's memory."""
        pool = self._pool()
        with ExitStack() as leases:
            for shape, dtype in SIZES:
                buffer = leases.enter_context(pool.lease(shape, dtype, CPU))
                known = storage_id(buffer) in _storages(pool)
                assert known or not buffer.numel(), f"`held` says nothing of the buffer of {shape} {dtype} that is lent"
            names = [name for name, _ in pool.held()]
            assert len(set(names)) == len(names), f"`held` has one name twice: {names}"

    def test_counts_are_numbers(self) -> None:
        """Where it counts; asking changes none of them."""
        pool = self._pool()
        self._lend_all(pool)
        counts_of(pool)

    def _pool(self) -> MemoryPool:
        """Returns the pool, made anew."""
        name, keys = self.pool["use"], {key: value for key, value in self.pool.items() if key != "use"}
        loader = plan_from_dict(small_plan()).loader  # a plan with a pool that nothing in it uses is refused
        plugin, record = loader.load(name.partition(".")[0]), loader.record("memory_pools", name)
        pool: MemoryPool = plugin.load_builder(record)(record.config.model_validate(keys))
        return pool

    def _lend_all(self, pool: MemoryPool) -> None:
        """Lends a buffer of each size at a time, and gives them back by an error."""
        with suppress(_BlockError), ExitStack() as leases:
            for size in SIZES:
                leases.enter_context(pool.lease(*size, CPU))
            raise _BlockError


class _BlockError(Exception):
    """Ends a block of leases."""


def _filled(buffer: Tensor, mark: int) -> Tensor:
    _bytes(buffer).fill_(mark)
    return buffer


def _is_filled(buffer: Tensor, mark: int) -> bool:
    return bool((_bytes(buffer) == mark).all())


def _bytes(buffer: Tensor) -> Tensor:
    """Returns a view of the buffer, uint8 [bytes]."""
    return buffer.detach().reshape(-1).view(torch.uint8)


def _storages(pool: MemoryPool) -> dict[int, int]:
    """Returns the bytes of each storage that the pool holds, by its identity."""
    tensors: Sequence[Tensor] = [tensor for _, tensor in pool.held()]
    return {storage_id(one): one.untyped_storage().nbytes() for one in tensors}


def _num_bytes(pool: MemoryPool) -> int:
    return sum(_storages(pool).values())

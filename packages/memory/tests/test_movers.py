"""Tests the number of copies, the host memory and the device memory of offloads."""

from itertools import pairwise
from mmap import PAGESIZE
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from odd_parts import PLAN
from parking import BETWEEN, EVERYTHING, poison_freed_memory, running, state_digest

from sley_core.api.comm import HostMemory
from sley_core.comm.device import CopyStream, Device
from sley_core.memory import Moved, group_by_storage
from sley_memory.arena import HostArena
from sley_memory.movers import HostCopyMover, Streams
from sley_trainer.update import states_of

MIB = 1 << 20
CPU = Device(torch.device("cpu"))


def make_host_copy(tensors, bucket_bytes=1000, make=CopyStream):
    """Returns a `HostCopyMover` of these tensors, its counters and its arena."""
    moved = Moved()
    named = [(str(at), tensor) for at, tensor in enumerate(tensors)]
    streams = Streams(make)
    arena = HostArena(CPU.host_memory, streams.wait)
    return HostCopyMover(lambda: group_by_storage(named), streams, arena, bucket_bytes, moved), moved, arena


def around(unit):
    unit.offload()
    unit.wait()
    unit.onload()
    unit.require()


@given(st.lists(st.tuples(st.sampled_from(["f", "b", "i", "u"]), st.integers(0, 300)), max_size=8), st.integers(1, 500))
@settings(max_examples=30, deadline=None)
def test_any_tensors_are_restored(kinds, bucket_bytes):
    """Tests any dtypes and sizes, scalars, views of one storage and transposed tensors, in buckets of any size."""
    dtypes = {"f": torch.float32, "b": torch.bfloat16, "i": torch.int64, "u": torch.uint8}
    tensors = [torch.arange(size).to(dtypes[kind]) for kind, size in kinds]
    tensors += [torch.tensor(2.5), torch.arange(12.0).view(3, 4).t(), *torch.arange(20.0).split(7)]
    wanted = [tensor.clone() for tensor in tensors]
    unit, moved, _ = make_host_copy(tensors, bucket_bytes)
    with poison_freed_memory():
        for _ in range(3):
            around(unit)
    assert all(torch.equal(tensor, value) for tensor, value in zip(tensors, wanted, strict=True))
    size = sum(value.nbytes for value in wanted[:-3]) + 80
    assert (moved.copied_out, moved.copied_in) == (3 * size, 3 * size)


def test_host_memory_equals_offloaded_bytes_and_is_reused():
    """Pages and alignment need at most 2 % more for 8 MiB, and twenty offloads need no more."""
    tensors = [torch.ones(size) for size in (1_500_000, 3, 250_001, 999, 400_000, 0)]
    size = sum(tensor.nbytes for tensor in tensors)
    assert size >= 8 * MIB
    unit, moved, arena = make_host_copy(tensors, bucket_bytes=MIB)
    around(unit)
    blocks = list(arena._blocks)
    for _ in range(20):
        tensors[0].add_(1)
        around(unit)
    assert size <= moved.host_bytes == arena.num_bytes <= 1.02 * size
    assert arena._blocks == blocks
    starts = [host.data_ptr() for host in unit._host_memory.values()]
    assert all(start % 256 == 0 for start in starts)
    assert all(second - first >= 256 for first, second in pairwise(starts))


@pytest.mark.parametrize(
    "sizes", [[5000] * 20, range(1000, 9000, 400), [1000, 3000] * 10], ids=["is made anew", "grows", "goes up and down"]
)
def test_changing_sizes_do_not_accumulate_host_memory(sizes):
    """Optimizers may replace states, and modules may cache tensors in buffers. A slot that is too small is freed if its
    block has no other slots.
    """
    state = {"weight": torch.ones(2000), "cache": torch.ones(500)}
    moved, streams = Moved(), Streams(CopyStream)
    arena = HostArena(CPU.host_memory, streams.wait)
    unit = HostCopyMover(lambda: group_by_storage(state.items()), streams, arena, 1000, moved)
    around(unit)
    first = arena.num_bytes
    for size in sizes:
        state["cache"] = torch.full((size,), float(size))
        with poison_freed_memory():
            around(unit)
        assert (state["cache"] == size).all()
        assert (state["weight"] == 1).all()
        assert arena.num_bytes == moved.host_bytes <= first + 4 * max(sizes) + 4096


def test_device_memory_grows_by_a_bucket_at_a_time():
    """At any time, the memory on the device and on the host exceeds the total by at most one bucket."""
    seen = []

    class Watched(CopyStream):
        def copy(self, target, source):
            super().copy(target, source)
            seen.append(sum(tensor.untyped_storage().nbytes() for tensor in tensors))

    tensors = [torch.ones(100) for _ in range(8)] + [torch.ones(4000)]
    unit, _, _ = make_host_copy(tensors, bucket_bytes=800, make=Watched)
    unit.offload()
    assert seen == [19_200, 19_200, 18_400, 18_400, 17_600, 17_600, 16_800, 16_800, 16_000]
    seen.clear()
    unit.onload()
    assert seen == [800, 800, 1600, 1600, 2400, 2400, 3200, 3200, 19_200]


MANY = {**PLAN, "model": {"factory": "odd_parts:many"}}
STATES = [{"use": "memory.optimizer_states"}]


def count_copies(monkeypatch, offload, moves):
    """Returns the digest of two steps, and the number of copies of the last moves."""
    copies = []
    copy = CopyStream.copy
    monkeypatch.setattr(CopyStream, "copy", lambda stream, *args: (copies.append(1), copy(stream, *args)))
    with running({**MANY, "offload": offload}, guards=False) as run:
        for _ in range(2):
            copies.clear()
            run.step()
            moves(run)
        return state_digest(run), len(copies)


def test_small_parameters_have_few_copies_in_each_direction(monkeypatch):
    """Small states of a bucket need one copy, large states one each."""

    def around(run):
        run.memory.offload().wait()
        run.memory.onload().wait()

    plain, _ = count_copies(monkeypatch, [], lambda run: None)
    found, copies = count_copies(monkeypatch, STATES, around)
    assert found == plain
    assert copies == 2 * (1 + 2)
    found, copies = count_copies(monkeypatch, [{**BETWEEN[0], "bucket_mb": 64.0}], lambda run: None)
    assert found == plain
    assert copies == 2 * (1 + 2)


def test_a_state_with_a_view_keeps_its_storage():
    """The view still shows the optimizer's values while they are on the device."""
    with running({**PLAN, "offload": EVERYTHING}) as run:
        run.step()
        states = [one.tensor for one in states_of(run.stepper.update) if one.tensor.dim()]
        view = states[0].view(-1)
        whole = sum(tensor.nbytes for tensor in states)
        objects = list(map(id, states))
        for _ in range(3):
            run.memory.offload()
            run.memory.onload()
            run.step()
            assert view.data_ptr() == states[0].data_ptr()
        storages = {tensor.untyped_storage().data_ptr() for tensor in states}
        assert len(storages) == 2, "one for the state with a view, one for all others"
        assert [id(one.tensor) for one in states_of(run.stepper.update) if one.tensor.dim()] == objects
        assert whole <= run.memory.bytes["optimizer_states"] <= whole + 256 * len(states)
        assert torch.equal(view, states[0].view(-1))


# -- host memory -------------------------------------------------------------------------------------------------------


def make_activation_arena(**options: Any) -> HostArena:
    """Returns an arena with the options of `memory.host`."""
    return HostArena(
        lambda num_bytes: HostMemory(num_bytes, lock=False), lambda: None, max_waste=1.25, frees_unused=False, **options
    )


def test_slots_are_reused_for_similar_sizes() -> None:
    lends = make_activation_arena()
    (first,) = lends.allocate([100 * PAGESIZE])
    lends.release(first)
    (again,) = lends.allocate([81 * PAGESIZE])
    assert again.data_ptr() == first.data_ptr()
    (other,) = lends.allocate([81 * PAGESIZE])
    assert other.data_ptr() != first.data_ptr(), "it is lent"
    lends.release(again)
    (small,) = lends.allocate([70 * PAGESIZE])
    assert small.data_ptr() != first.data_ptr(), "too large for this"
    assert (lends.num_allocations, lends.num_bytes) == (3, 251 * PAGESIZE)


def test_changing_lengths_do_not_accumulate_and_no_block_is_freed_within_a_step() -> None:
    """Unlocking memory may wait for the device, and so for a peer that waits for this rank."""
    lends = make_activation_arena()
    for step in range(1, 200):
        lends.trim(2 * lends.max_lent_bytes)
        before = lends.num_bytes
        assert before <= 2 * lends.max_lent_bytes
        lent = [lends.allocate([((step * 7919 + layer * 104729) % 1000 + 1) * PAGESIZE])[0] for layer in range(4)]
        for place in lent:
            lends.release(place)
        assert lends.num_bytes >= before
    assert lends.num_bytes <= 3 * lends.max_lent_bytes + 8 * PAGESIZE
    assert lends.trim() > 0
    assert (lends.num_bytes, lends.num_lent_bytes, list(lends.named_tensors())) == (0, 0, [])


def test_a_budget_of_page_locked_memory_is_kept_with_one_warning() -> None:
    sizes = []

    def make(num_bytes: int) -> HostMemory:
        sizes.append(num_bytes)
        memory = HostMemory(num_bytes, lock=False)
        memory.is_locked = True
        return memory

    lends, moved = HostArena(make, lambda: None, max_locked_bytes=10_000), Moved()
    lends.allocate([5000], moved)
    with pytest.warns(RuntimeWarning, match=r"`host_budget_mb` allows 0.*pageable"):
        (place,) = lends.allocate([20_000], moved)
    lends.allocate([20_000], moved)
    assert sizes == [5120]
    assert place.numel() == 20_000
    assert moved.host_bytes == lends.num_bytes

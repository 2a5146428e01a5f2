"""Host memory is exact, used again, bounded where lengths differ, and page-locked within a budget."""

from __future__ import annotations

from mmap import PAGESIZE
from typing import Any

import pytest

from sley_core.api.memory import HostMemory, Moved
from sley_memory.arena import HostArena


def arena(**options: Any) -> HostArena:
    """As `memory.host` makes it."""
    return HostArena(lambda num_bytes: HostMemory(num_bytes, lock=False), lambda: None, most_waste=1.25, frees=False, **options)


def test_places_are_lent_again_for_almost_the_same_size() -> None:
    lends = arena()
    (first,) = lends.places([100 * PAGESIZE])
    lends.give(first)
    (again,) = lends.places([81 * PAGESIZE])
    assert again.data_ptr() == first.data_ptr()
    (other,) = lends.places([81 * PAGESIZE])
    assert other.data_ptr() != first.data_ptr(), "it is lent"
    lends.give(again)
    (small,) = lends.places([70 * PAGESIZE])
    assert small.data_ptr() != first.data_ptr(), "too large for this"
    assert (lends.num_allocations, lends.num_bytes) == (3, 251 * PAGESIZE)


def test_other_lengths_in_every_step_do_not_add_up_and_nothing_is_freed_within_a_step() -> None:
    """Unlocking memory may wait for the device, and so for a peer that waits for this rank."""
    lends = arena()
    for step in range(1, 200):
        lends.trim(2 * lends.max_lent_bytes)
        before = lends.num_bytes
        assert before <= 2 * lends.max_lent_bytes
        lent = [lends.places([((step * 7919 + layer * 104729) % 1000 + 1) * PAGESIZE])[0] for layer in range(4)]
        for place in lent:
            lends.give(place)
        assert lends.num_bytes >= before
    assert lends.num_bytes <= 3 * lends.max_lent_bytes + 8 * PAGESIZE
    assert lends.trim() > 0
    assert (lends.num_bytes, lends.num_lent_bytes, list(lends.held())) == (0, 0, [])


def test_a_budget_of_page_locked_memory_is_kept_with_one_warning() -> None:
    sizes = []

    def make(num_bytes: int) -> HostMemory:
        sizes.append(num_bytes)
        memory = HostMemory(num_bytes, lock=False)
        memory.is_locked = True
        return memory

    lends, moved = HostArena(make, lambda: None, budget=10_000), Moved()
    lends.places([5000], moved)
    with pytest.warns(RuntimeWarning, match=r"`host_budget_mb` allows 0.*pageable"):
        (place,) = lends.places([20_000], moved)
    lends.places([20_000], moved)
    assert sizes == [5120]
    assert place.numel() == 20_000
    assert moved.host_bytes == lends.num_bytes


def test_places_of_one_call_lie_side_by_side_and_their_block_is_freed_whole() -> None:
    lends, moved = HostArena(lambda num_bytes: HostMemory(num_bytes, lock=False), lambda: None), Moved()
    first, second = lends.places([300, 5000], moved)
    assert second.data_ptr() - first.data_ptr() == 512
    lends.give(first)
    lends.places([10_000], moved)
    assert lends.num_allocations == 2
    assert lends.num_bytes == 2 * PAGESIZE + 3 * PAGESIZE, "one place of the first block is lent"
    lends.give(second)
    lends.places([20_000], moved)
    assert lends.num_bytes == moved.host_bytes == 3 * PAGESIZE + 5 * PAGESIZE

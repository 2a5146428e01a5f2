"""Host buffers are exact, used again, bounded where lengths differ, and within a budget."""

from __future__ import annotations

from mmap import PAGESIZE
from typing import Any

import pytest

from sley_core.api.comm import HostMemory
from sley_core.comm.copies import HostStream
from sley_memory.host_buffers import HostBuffers


def buffers(budget_bytes: int | None = None) -> HostBuffers:
    return HostBuffers(lambda num_bytes: HostMemory(num_bytes, lock=False), HostStream(), budget_bytes)


def taken(made: HostBuffers, num_bytes: int) -> Any:
    buffer = made.take(num_bytes)
    assert buffer is not None
    assert buffer.data.numel() >= num_bytes
    return buffer


def test_a_buffer_takes_whole_pages_and_no_more() -> None:
    made = buffers()
    taken(made, 5 * PAGESIZE + 1)
    assert (made.num_bytes, made.num_lent_bytes) == (6 * PAGESIZE, 5 * PAGESIZE + 1)


def test_what_came_back_is_lent_again_for_almost_the_same_size() -> None:
    made = buffers()
    first = taken(made, 100 * PAGESIZE)
    made.give(first)
    assert taken(made, 81 * PAGESIZE) is first
    assert taken(made, 81 * PAGESIZE) is not first, "it is lent"
    made.give(first)
    assert taken(made, 70 * PAGESIZE) is not first, "too large for this"
    assert made.num_allocations == 3


def test_other_lengths_in_every_step_do_not_add_up() -> None:
    made = buffers()
    for step in range(1, 200):
        made.begin()
        assert made.num_bytes <= 2 * made.max_lent_bytes
        lent = [taken(made, (step * 7919 + layer * 104729) % 1000 * PAGESIZE + 1) for layer in range(4)]
        for buffer in lent:
            made.give(buffer)
    assert made.num_bytes <= 3 * made.max_lent_bytes + 8 * PAGESIZE
    assert made.trim() > 0
    assert (made.num_bytes, list(made.held())) == (0, [])


def test_nothing_is_unlocked_within_a_step() -> None:
    """That may wait for the device, and so for a peer that waits for this rank."""
    made = buffers()
    made.begin()
    for pages in range(1, 100, 9):
        made.give(taken(made, pages * PAGESIZE))
    assert made.num_bytes == sum(range(1, 100, 9)) * PAGESIZE
    made.begin()
    assert made.num_bytes <= 2 * made.max_lent_bytes


@pytest.mark.parametrize("num_bytes", [8, 600, PAGESIZE // 3, PAGESIZE + 1])
def test_buffers_much_smaller_than_their_pages_are_allocated_once(num_bytes: int) -> None:
    made = buffers()
    for _ in range(3):
        made.begin()
        for buffer in [taken(made, num_bytes) for _ in range(33)]:
            made.give(buffer)
    assert made.num_allocations == 33


def test_a_budget_counts_what_is_lent() -> None:
    made = buffers(budget_bytes=1000)
    first = taken(made, 600)
    assert made.take(401) is None
    taken(made, 400)
    made.give(first)
    taken(made, 600)
    assert made.max_lent_bytes == 1000

"""Transfers: the same order at both ends, no wait that cannot end, and few buffers."""

from __future__ import annotations

from collections import defaultdict, deque
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sley_core.actions.action import DIRECTIONS, Kind, Placement, Transfer, direction_of, forward_only, loop, v
from sley_core.actions.lower import lower
from sley_core.actions.simulate import Costs, Delivery, simulate, taken

ANY = st.tuples(st.integers(2, 5), st.integers(1, 3)).flatmap(lambda size: st.permutations([*range(size[0])] * size[1]))
PLACEMENTS = st.one_of(
    st.builds(loop, st.integers(2, 5), st.integers(1, 3)),
    st.builds(v, st.integers(2, 5)),
    ANY.map(lambda route: Placement(tuple(route))),
)


def delivery_of(stage, step, placement) -> Delivery:
    """What a transfer of `stage` carries, named alike at both ends."""
    holder = (stage, step.chunk) if step.op == "post" else (step.peer, step.peer_chunk)
    return Delivery(step.flow, placement.position(*holder), step.micro)


def way(stage, step):
    return direction_of(stage, step.peer) if step.op == "send" else direction_of(step.peer, stage)


def transfers(steps):
    return [step for step in steps if isinstance(step, Transfer)]


@given(PLACEMENTS, st.integers(1, 6), st.booleans(), st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_both_ends_of_each_pair_issue_the_same_transfers_in_the_same_order(any_lists, placement, micros, training, seed):
    lists = any_lists(placement, micros, Random(seed))
    lists = lists if training else [forward_only(actions) for actions in lists]
    ends = defaultdict(list)
    for stage, steps in enumerate(lower(lists, placement, micros, training=training)):
        for step in transfers(steps):
            pair = (way(stage, step), *sorted((stage, step.peer)), stage)
            ends[pair].append((delivery_of(stage, step, placement), step.op))
    for (direction, low, high, stage), issued in ends.items():
        other = ends[direction, low, high, low + high - stage]
        assert [delivery for delivery, _ in issued] == [delivery for delivery, _ in other]
        assert all({op, facing} == {"post", "send"} for (_, op), (_, facing) in zip(issued, other, strict=True))
        assert len({op for _, op in issued}) == 1, "between two stages a way has one direction"


@given(PLACEMENTS, st.integers(1, 6), st.booleans(), st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_lists_end_even_where_a_way_does_one_thing_at_a_time(any_lists, placement, micros, training, seed):
    """The strictest backend: per stage and way one queue, whose head is done when it is the head at both ends."""
    lists = any_lists(placement, micros, Random(seed))
    lists = lists if training else [forward_only(actions) for actions in lists]
    rest = [deque(steps) for steps in lower(lists, placement, micros, training=training)]
    queues = {(stage, direction): deque() for stage in range(placement.stages) for direction in DIRECTIONS}
    here: set[Delivery] = set()
    moved = True
    while moved:
        moved = False
        for stage, steps in enumerate(rest):
            while steps:
                step = steps[0]
                if isinstance(step, Transfer):
                    queues[stage, way(stage, step)].append((delivery_of(stage, step, placement), step.peer))
                elif step.kind is not Kind.CHUNK_DONE:
                    needed = taken(step, placement.position(stage, step.chunk), placement)
                    local = needed and placement.holder(needed.origin).stage == stage
                    if needed and not local and needed not in here:
                        break
                steps.popleft()
                moved = True
        for (stage, direction), queue in queues.items():
            while queue:
                delivery, peer = queue[0]
                facing = queues[peer, direction]
                if not facing or facing[0] != (delivery, stage):
                    break
                here.add(delivery)
                facing.popleft()
                queue.popleft()
                moved = True
    assert not any(rest)
    assert not any(queues.values())


@pytest.mark.parametrize("micros", [8, 64])
def test_the_number_of_receive_buffers_does_not_grow_with_the_number_of_micro_batches(breadth_first, micros):
    placement = loop(4)
    simulated = simulate(lower(breadth_first(placement, micros), placement, micros), placement, Costs.even(4))
    assert [held.receives for held in simulated.peaks] == [5, 4, 4, 5]

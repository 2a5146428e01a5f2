"""A simulated step: times by hand, what is held by another count, and quickly."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sley_core.actions.action import Action, Kind, Placement, Transfer, forward_only, loop, sequential, v_placement
from sley_core.actions.lower import lower
from sley_core.actions.simulate import Costs, Peaks, Timeline, simulate
from sley_core.errors import PlanError
from sley_testing.runs import random_action_lists

F, B, D, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT

ANY = st.tuples(st.integers(1, 4), st.integers(1, 3)).flatmap(lambda size: st.permutations([*range(size[0])] * size[1]))
PLACEMENTS = st.one_of(
    st.builds(loop, st.integers(1, 4), st.integers(1, 3)),
    st.builds(v_placement, st.integers(1, 4)),
    ANY.map(lambda route: Placement(tuple(route))),
)


def times(timeline: Timeline, stage: int) -> list[tuple[str, float, float]]:
    return [(str(span.action), span.start_s, span.end_s) for span in timeline.stage_spans(stage)]


def test_two_stages_by_hand():
    """F takes 1 and 3 s, B 2 and 4 s, the link half a second."""
    placement = loop(2)
    costs = Costs({F: (1.0, 3.0), B: (2.0, 4.0)}, (0.5,), (0, 0), (0, 0), (0,))
    found = simulate(lower([sequential(1)] * 2, placement, 1), placement, costs).timeline
    assert times(found, 0) == [("F0.0", 0.0, 1.0), ("B0.0", 9.0, 11.0)]
    assert times(found, 1) == [("F0.0", 1.5, 4.5), ("B0.0", 4.5, 8.5)]
    assert found.makespan_s == 11.0
    assert (found.idle_share(0), found.idle_share(1)) == (pytest.approx(8 / 11), pytest.approx(4 / 11))


def test_transfers_of_one_link_come_one_after_another():
    """Three forwards of 1 s, sent over a link of 2 s: the second has to wait for the first."""
    placement = loop(2)
    lists = [[Action(F, 0, micro) for micro in range(3)]] * 2
    found = simulate(lower(lists, placement, 3, training=False), placement, Costs.even(2, link=2.0)).timeline
    assert [start for _, start, _ in times(found, 1)] == [3.0, 5.0, 7.0]


def test_a_transfer_waits_for_its_post():
    """The second post stands behind the first forward, which ends at 4 s."""
    placement = loop(2)
    first, second = lower([[Action(F, 0, micro) for micro in range(2)]] * 2, placement, 2, training=False)
    posts = [step for step in second if isinstance(step, Transfer)]
    late = (posts[0], Action(F, 0, 0), posts[1], Action(F, 0, 1))
    found = simulate([first, late], placement, Costs.even(2, link=2.0)).timeline
    assert times(found, 1) == [("F0.0", 3.0, 4.0), ("F0.1", 6.0, 7.0)]


def test_lowered_lists_that_stop_are_refused():
    placement = loop(2)
    first, second = lower([sequential(1)] * 2, placement, 1)
    unposted = [step for step in second if not isinstance(step, Transfer)]
    with pytest.raises(PlanError, match=r"stage 0 at B0.0 .*; stage 1 at F0.0 \(number 1 in its list\) waits for F0.0"):
        simulate([first, unposted], placement, Costs.even(2))


def test_bytes_are_those_of_graphs_queues_and_buffers():
    """Stage 1 holds at most two graphs of 100, then one with a queue of 30, and its buffers of 7 for outputs."""
    placement = loop(2)
    costs = Costs(dict.fromkeys((F, B, D, W), (1.0, 1.0)), (0.0,), (1, 100), (1, 30), (7,))
    later = [Action(F, 0, 0), Action(F, 0, 1), *(Action(kind, 0, micro) for kind in (D, W) for micro in (0, 1))]
    held = simulate(
        lower([sequential(2)[:1] + sequential(2)[2:3] + sequential(2)[1::2], later], placement, 2), placement, costs
    ).peaks
    assert held[1] == Peaks(pairs=2, graphs=2, receives=2, num_bytes=200)
    assert held[0].pairs == 2


@given(PLACEMENTS, st.integers(1, 5), st.booleans(), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_a_simulation_does_everything_once_in_the_order_of_the_lists_and_tells_what_is_held(placement, micros, training, seed):
    chance = Random(seed)
    lists = random_action_lists(placement, micros, chance)
    lists = lists if training else [forward_only(actions) for actions in lists]
    each = {kind: tuple(chance.uniform(0.1, 2) for _ in range(placement.num_positions)) for kind in (F, B, D, W)}
    none = (0,) * placement.num_positions
    costs = Costs(each, tuple(chance.uniform(0, 2) for _ in none[1:]), none, none, none[1:])
    found = simulate(lower(lists, placement, micros, training=training), placement, costs)
    ends = {
        (span.action.kind, placement.position(span.stage, span.action.chunk), span.action.micro): span.end_s
        for span in found.timeline.spans
    }
    assert sum(map(len, lists)) == len(found.timeline.spans) == len(ends)
    for stage, actions in enumerate(lists):
        spans = found.timeline.stage_spans(stage)
        assert [span.action for span in spans] == actions
        assert all(one.end_s <= other.start_s for one, other in pairwise(spans))
        for span in spans:
            position = placement.position(stage, span.action.chunk)
            before = {F: [(F, position - 1)], W: [(D, position)]}.get(
                span.action.kind, [(F, position), (B, position + 1), (D, position + 1)]
            )
            assert all(ends.get((*one, span.action.micro), 0.0) <= span.start_s for one in before)
        alive, peak = Counter(), 0
        for action in actions if training else ():
            pair = action.chunk, action.micro
            alive[pair] += {F: 1, B: -1, D: 0, W: -1}[action.kind]
            peak = max(peak, alive.total())
        assert found.peaks[stage].pairs == peak
    assert found == simulate(lower(lists, placement, micros, training=training), placement, costs)


def breadth_first(placement: Placement, micros: int) -> list[list[Action]]:
    """All forwards, chunk by chunk, then all backwards."""
    chunks = range(placement.chunks)
    forwards = [Action(F, chunk, micro) for chunk in chunks for micro in range(micros)]
    backwards = [Action(B, chunk, micro) for chunk in reversed(chunks) for micro in range(micros)]
    return [forwards + backwards for _ in range(placement.stages)]


@pytest.mark.parametrize("micros", [8, 64])
def test_the_number_of_receive_buffers_does_not_grow_with_the_number_of_micro_batches(micros):
    placement = loop(4)
    simulated = simulate(lower(breadth_first(placement, micros), placement, micros), placement, Costs.even(4))
    assert [held.receives for held in simulated.peaks] == [5, 4, 4, 5]

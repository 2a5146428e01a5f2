"""`lower` adds what readers need and refuses what is not a step; a simulated step takes the times of a count by hand."""

from collections import Counter, deque
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sley_core.actions.action import (
    Action,
    Delivery,
    Kind,
    Placement,
    Schedule,
    StageChunk,
    Transfer,
    direction_of,
    evaluation_lists,
    loop,
    select_actions,
    select_forwards,
    sequential_actions,
    v_placement,
)
from sley_core.actions.lower import lower
from sley_core.actions.simulate import Costs, Peaks, Timeline, simulate
from sley_core.errors import PlanError
from sley_testing.runs import random_action_lists

F, B, D, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT
ALONE = loop(1)


def texts(steps) -> list[str]:
    return [str(step) for step in steps]


def words(text: str) -> list[Action]:
    """`F0.1 B0.1`, read."""
    return [Action(Kind(word[0]), *map(int, word[1:].split("."))) for word in text.split()]


def test_every_chunk_has_its_own_mark_after_its_last_weight_gradient():
    (steps,) = lower([words("F0.0 F1.0 B1.0 I0.0 W0.0")], loop(1, 2), 1)
    assert texts(steps) == ["F0.0", "F1.0", "B1.0", "C1", "I0.0", "W0.0", "C0"]


def test_a_send_follows_at_once_and_a_receive_is_posted_ahead():
    """Two stages, one microbatch at a time; the gradient is on its way before its chunk is marked."""
    lists = [sequential_actions(2), words("F0.0 I0.0 W0.0 F0.1 I0.1 W0.1")]
    first, second = lower(lists, loop(2), 2)
    assert texts(first) == [
        *("post backward 0.0 from stage 1", "post backward 0.1 from stage 1", "F0.0", "send forward 0.0 to stage 1"),
        *("B0.0", "F0.1", "send forward 0.1 to stage 1", "B0.1", "C0"),
    ]
    assert texts(second) == [
        *("post forward 0.0 from stage 0", "post forward 0.1 from stage 0", "F0.0", "I0.0", "send backward 0.0 to stage 0"),
        *("W0.0", "F0.1", "I0.1", "send backward 0.1 to stage 0", "W0.1", "C0"),
    ]


def test_what_passes_between_chunks_of_one_stage_is_not_sent():
    lists = [words("F0.0 F1.0 B1.0 B0.0")] * 2
    first, second = lower(lists, v_placement(2), 1)
    assert [word for word in texts(second) if "send" in word] == ["send forward 1.0 to stage 0", "send backward 0.0 to stage 0"]
    assert [word for word in texts(first) if "send" in word] == ["send forward 0.0 to stage 1", "send backward 1.0 to stage 1"]


@pytest.mark.parametrize(
    ("placement", "lists", "fault"),
    [
        (ALONE, "B0.0 F0.0", "B0.0 (number 1 of stage 0's list) comes before its F0.0"),
        (ALONE, "F0.0 F0.0 B0.0", "F0.0 (number 2 of stage 0's list) is repeated"),
        (ALONE, "F0.0 B0.0 W0.0", "W0.0 (number 3 of stage 0's list) comes before its I0.0"),
        (ALONE, "F0.0 F0.1 B0.0", "F0.1 (number 2 of stage 0's list) is outside 1 chunks and 1 microbatches"),
        (ALONE, "F0.0 C0.0 B0.0", "C0.0 (number 2 of stage 0's list) is not a compute action"),
        (ALONE, "F0.0 I0.0 B0.0", "B0.0 (number 3 of stage 0's list) repeats a backward, since there is also"),
        (ALONE, "F0.0", "B0.0 is missing from stage 0's list"),
        (ALONE, "F0.0 I0.0", "W0.0 is missing from stage 0's list"),
        (ALONE, "", "F0.0 is missing from stage 0's list"),
        (loop(2), "F0.0 B0.0", "the schedule must have 2 action lists, one per stage, but has 1"),
    ],
)
def test_what_is_not_a_step_is_refused_with_the_first_bad_action(placement, lists, fault):
    with pytest.raises(PlanError) as caught:
        lower([words(lists)], placement, 1)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "schedule-wrong"
    assert fault in diagnostic.message


def test_lists_that_wait_for_each_other_are_refused_with_what_each_stage_waits_for():
    lists = [words("F0.0 B0.0 F0.1 B0.1"), words("F0.1 B0.1 F0.0 B0.0")]
    with pytest.raises(PlanError) as caught:
        lower(lists, loop(2), 2)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "schedule-deadlock"
    assert diagnostic.message == (
        "the schedule deadlocks: stage 0 at B0.0 (number 2 in its list) waits for B0.0 of stage 1; "
        "stage 1 at F0.1 (number 1 in its list) waits for F0.1 of stage 0"
    )


def can_run(lists, placement, micros) -> bool:
    """Whether `lists` are one step, told by the plainest means: walk as long as any stage can go on."""
    done: set[tuple[Kind, int, int]] = set()
    rest = [list(actions) for actions in lists]
    before = -1
    while len(done) > before:
        before = len(done)
        for stage, actions in enumerate(rest):
            while actions:
                kind, micro, at = actions[0].kind, actions[0].micro, placement.position(stage, actions[0].chunk)
                needed = {F: [{(F, at - 1, micro)}], W: [{(D, at, micro)}]}.get(
                    kind, [{(F, at, micro)}, {(B, at + 1, micro), (D, at + 1, micro)}]
                )
                ends = (kind is F and at == 0) or (kind in (B, D) and at + 1 == placement.num_positions)
                free = [options for options in needed if not options & done]
                if (kind, at, micro) in done or (free and not (ends and free[0] == needed[-1])):
                    break
                done.add((kind, at, micro))
                actions.pop(0)
    pairs = [(at, micro) for at in range(placement.num_positions) for micro in range(micros)]
    whole = sum((B, *pair) in done for pair in pairs)
    split = sum((D, *pair) in done and (W, *pair) in done and (B, *pair) not in done for pair in pairs)
    return not any(rest) and sum((F, *pair) in done for pair in pairs) == whole + split == len(pairs)


ROUTES = st.tuples(st.integers(1, 5), st.integers(1, 3)).flatmap(lambda size: st.permutations([*range(size[0])] * size[1]))
PLACEMENTS = st.one_of(
    st.builds(loop, st.integers(1, 5), st.integers(1, 3)),
    st.builds(v_placement, st.integers(1, 5)),
    ROUTES.map(tuple).map(Placement),
)


@given(PLACEMENTS, st.integers(1, 4), st.sampled_from(["none", "drop", "repeat", "swap", "move"]), st.integers(0, 10**6))
@settings(max_examples=150, deadline=None)
def test_a_changed_list_is_accepted_exactly_if_it_still_is_a_step(placement, micros, mutation, seed):
    chance = Random(seed)
    lists = random_action_lists(placement, micros, chance)
    actions = lists[chance.randrange(len(lists))]
    at, other = chance.randrange(len(actions)), chance.randrange(len(actions))
    match mutation:
        case "drop":
            del actions[at]
        case "repeat":
            actions.insert(other, actions[at])
        case "swap":
            actions[at], actions[other] = actions[other], actions[at]
        case "move":
            actions.insert(other, actions.pop(at))
    if can_run(lists, placement, micros):
        lowered = lower(lists, placement, micros)
        kept = [[action for action in select_actions(steps) if action.kind is not Kind.CHUNK_DONE] for steps in lowered]
        assert kept == lists
    else:
        with pytest.raises(PlanError) as caught:
            lower(lists, placement, micros)
        assert caught.value.diagnostics[0].code in ("schedule-wrong", "schedule-deadlock")


def delivery_of(stage, step, placement) -> Delivery:
    """What a transfer of `stage` carries, named alike at both ends."""
    holder = (stage, step.chunk) if step.op == "post" else (step.peer, step.peer_chunk)
    return Delivery(step.flow, placement.position(*holder), step.micro)


def way(stage, step):
    return direction_of(stage, step.peer) if step.op == "send" else direction_of(step.peer, stage)


@given(PLACEMENTS, st.integers(1, 6), st.booleans(), st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_lists_end_even_where_a_way_does_one_thing_at_a_time(placement, micros, training, seed):
    """The strictest backend: per stage and way one queue, whose head is done when it is the head at both ends.

    So both ends of each pair issue the same transfers in the same order.
    """
    lists = random_action_lists(placement, micros, Random(seed))
    lists = lists if training else [select_forwards(actions) for actions in lists]
    rest = [deque(steps) for steps in lower(lists, placement, micros, training=training)]
    queues = {(stage, direction): deque() for stage in range(placement.stages) for direction in ("up", "down")}
    here: set[Delivery] = set()
    moved = True
    while moved:
        moved = False
        for stage, steps in enumerate(rest):
            while steps:
                step = steps[0]
                if isinstance(step, Transfer):
                    queues[stage, way(stage, step)].append((delivery_of(stage, step, placement), step.peer, step.op))
                elif step.kind is not Kind.CHUNK_DONE:
                    needed = placement.input_of(step, placement.position(stage, step.chunk))
                    local = needed and placement.holder(needed.source_position).stage == stage
                    if needed and not local and needed not in here:
                        break
                steps.popleft()
                moved = True
        for (stage, direction), queue in queues.items():
            while queue:
                delivery, peer, op = queue[0]
                facing = queues[peer, direction]
                if not facing or facing[0] != (delivery, stage, "post" if op == "send" else "send"):
                    break
                here.add(delivery)
                facing.popleft()
                queue.popleft()
                moved = True
    assert not any(rest)
    assert not any(queues.values())


@given(PLACEMENTS)
def test_every_position_is_held_once_beside_its_neighbours(placement):
    holders = [placement.holder(position) for position in range(placement.num_positions)]
    assert len(set(holders)) == placement.num_positions == placement.stages * placement.chunks
    assert [placement.position(*holder) for holder in holders] == list(range(placement.num_positions))

    assert [placement.previous(*holder) for holder in holders] == [None, *holders[:-1]]
    assert [placement.next(*holder) for holder in holders] == [*holders[1:], None]


def test_a_loop_goes_round_and_a_v_turns():
    round_and_round, turned = loop(4, 2), v_placement(4)
    assert [round_and_round.position(stage, 1) for stage in range(4)] == [4, 5, 6, 7]
    assert [turned.position(stage, 1) for stage in range(4)] == [7, 6, 5, 4]
    assert round_and_round.next(3, 0) == StageChunk(0, 1)
    assert turned.next(3, 0) == StageChunk(3, 1)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (lambda: loop(0), "but has none"),
        (lambda: v_placement(2, 3), "a V, which needs two chunks per stage, not 3"),
        (lambda: Placement((0, 2)), "on each of the stages 0, 1, 2, ..., but has 1 on stage 0, 1 on stage 2"),
        (lambda: Placement((0, 1, 1)), "but has 1 on stage 0, 2 on stage 1"),
        (lambda: Placement((0, -1)), "but has 1 on stage -1, 1 on stage 0"),
        (lambda: Schedule(list, 2, lambda stages, _: loop(stages)).placement(4), "1 chunks .* but the plan has 2 on each of 4"),
        (lambda: Schedule(list, 1, lambda *_: loop(2)).placement(4), "each of 2 stages, but the plan has 1 on each of 4"),
    ],
)
def test_an_impossible_deal_is_refused(place, words):
    with pytest.raises(PlanError, match=words) as caught:
        place()
    (found,) = caught.value.diagnostics
    assert (found.code, found.path) == ("placement-wrong", ("pipeline", "use"))


# -- simulated steps ---------------------------------------------------------------------------------------------------------


def times(timeline: Timeline, stage: int) -> list[tuple[str, float, float]]:
    return [(str(span.action), span.start_s, span.end_s) for span in timeline.stage_spans(stage)]


def test_two_stages_by_hand():
    """F takes 1 and 3 s, B 2 and 4 s, the link half a second."""
    placement = loop(2)
    costs = Costs({F: (1.0, 3.0), B: (2.0, 4.0)}, (0.5,), (0, 0), (0, 0), (0,))
    found = simulate(lower([sequential_actions(1)] * 2, placement, 1), placement, costs).timeline
    assert times(found, 0) == [("F0.0", 0.0, 1.0), ("B0.0", 9.0, 11.0)]
    assert times(found, 1) == [("F0.0", 1.5, 4.5), ("B0.0", 4.5, 8.5)]
    assert found.makespan_s == 11.0
    assert (found.idle_share(0), found.idle_share(1)) == (pytest.approx(8 / 11), pytest.approx(4 / 11))


def test_transfers_of_one_link_come_one_after_another():
    """Three forwards of 1 s, sent over a link of 2 s: the second has to wait for the first."""
    placement = loop(2)
    lists = [[Action(F, 0, micro) for micro in range(3)]] * 2
    found = simulate(lower(lists, placement, 3, training=False), placement, Costs.uniform(2, link=2.0)).timeline
    assert [start for _, start, _ in times(found, 1)] == [3.0, 5.0, 7.0]


def test_a_transfer_waits_for_its_post():
    """The second post stands behind the first forward, which ends at 4 s."""
    placement = loop(2)
    first, second = lower([[Action(F, 0, micro) for micro in range(2)]] * 2, placement, 2, training=False)
    posts = [step for step in second if isinstance(step, Transfer)]
    late = (posts[0], Action(F, 0, 0), posts[1], Action(F, 0, 1))
    found = simulate([first, late], placement, Costs.uniform(2, link=2.0)).timeline
    assert times(found, 1) == [("F0.0", 3.0, 4.0), ("F0.1", 6.0, 7.0)]


def test_lowered_lists_that_stop_are_refused():
    placement = loop(2)
    first, second = lower([sequential_actions(1)] * 2, placement, 1)
    unposted = [step for step in second if not isinstance(step, Transfer)]
    with pytest.raises(PlanError, match=r"stage 0 at B0.0 .*; stage 1 at F0.0 \(number 1 in its list\) waits for F0.0"):
        simulate([first, unposted], placement, Costs.uniform(2))


def test_bytes_are_those_of_graphs_queues_and_buffers():
    """Stage 1 holds at most two graphs of 100, then one with a queue of 30, and its buffers of 7 for outputs."""
    placement = loop(2)
    costs = Costs(dict.fromkeys((F, B, D, W), (1.0, 1.0)), (0.0,), (1, 100), (1, 30), (7,))
    lists = [words("F0.0 F0.1 B0.0 B0.1"), words("F0.0 F0.1 I0.0 I0.1 W0.0 W0.1")]
    held = simulate(lower(lists, placement, 2), placement, costs).peaks
    assert held[1] == Peaks(pairs=2, graphs=2, receives=2, num_bytes=200)
    assert held[0].pairs == 2


@given(PLACEMENTS, st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_an_evaluation_needs_no_schedule(placement, micros):
    """Any placement and any number of microbatches. `lower` refuses lists that are not complete or never end."""
    steps = lower(evaluation_lists(placement, micros), placement, micros, training=False)
    assert sum(len(select_actions(actions)) for actions in steps) == placement.num_positions * micros


@given(PLACEMENTS, st.integers(1, 5), st.booleans(), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_a_simulation_does_everything_once_in_the_order_of_the_lists_and_tells_what_is_held(placement, micros, training, seed):
    chance = Random(seed)
    lists = random_action_lists(placement, micros, chance)
    lists = lists if training else [select_forwards(actions) for actions in lists]
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
    simulated = simulate(lower(breadth_first(placement, micros), placement, micros), placement, Costs.uniform(4))
    assert [held.receives for held in simulated.peaks] == [5, 4, 4, 5]

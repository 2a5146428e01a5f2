"""Tests that every schedule can run and has the bubble of its paper, and the files of schedules."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pp_parts import write_csv

from sley_core.actions.action import Action, Kind, Schedule, loop, v_placement
from sley_core.actions.lower import lower
from sley_core.actions.simulate import Costs, ScheduleSimulator, SimulatedStep, simulate
from sley_core.errors import PlanError
from sley_pp.plugin import BalancedPartitionConfig, CsvConfig, ExplicitPartitionConfig, UniformPartitionConfig
from sley_pp.schedules import (
    balanced_boundaries,
    build_balanced,
    build_csv,
    build_explicit,
    build_uniform,
    gpipe,
    insert_weight_gradients,
    interleaved,
    one_f_one_b,
    read_csv,
    round_sizes,
    uniform_boundaries,
    zero_bubble_h1,
    zero_bubble_v,
)

SCHEDULES = {
    "gpipe": Schedule(gpipe),
    "one_f_one_b": Schedule(one_f_one_b),
    "interleaved 2": Schedule(interleaved, 2),
    "interleaved 3": Schedule(interleaved, 3),
    "zero_bubble_h1": Schedule(zero_bubble_h1),
    "zero_bubble_v": Schedule(zero_bubble_v, 2, v_placement),
}
SIZES = [(stages, micros) for stages in (2, 3, 4, 8) for micros in range(1, 17)]

sizes = pytest.mark.parametrize(("stages", "micros"), SIZES)
schedules = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


def simulated(schedule: Schedule, stages: int, micros: int, *, f=1.0, d=1.0, w=1.0, link=0.0) -> SimulatedStep:
    placement = schedule.placement(stages)
    lowered = lower(schedule.lists(stages, micros), placement, micros)
    costs = Costs.uniform(placement.num_positions, forward=f, input_gradient=d, weight_gradient=w, link=link)
    return simulate(lowered, placement, costs)


def bubble(schedule: Schedule, stages: int, micros: int, *, f=1.0, d=1.0, w=1.0) -> float:
    """Returns the time of a step beyond its work."""
    work = schedule.chunks * micros * (f + d + w)
    return simulated(schedule, stages, micros, f=f, d=d, w=w).timeline.makespan_s - work


# -- how long ----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(16)
@sizes
def test_1f1b_and_gpipe_wait_for_one_forward_and_backward_per_other_stage(stages, micros):
    for name in ("gpipe", "one_f_one_b"):
        for f, d, w in ((1, 1, 1), (1, 1.5, 1), (2, 1, 1)):
            assert bubble(SCHEDULES[name], stages, micros, f=f, d=d, w=w) == pytest.approx((stages - 1) * (f + d + w))


@pytest.mark.sample(16)
@sizes
@pytest.mark.parametrize("chunks", [2, 3])
def test_chunks_divide_the_bubble_unless_a_round_is_shorter_than_the_pipeline(stages, micros, chunks):
    """The unit is the time of a chunk. A round shorter than the pipeline waits once per additional chunk."""
    waits = (chunks - 1) * max(0, stages - micros)
    assert bubble(SCHEDULES[f"interleaved {chunks}"], stages, micros) == 3 * (stages - 1 + waits)


@pytest.mark.sample(16)
@sizes
def test_zero_bubble_h1_waits_a_third_of_1f1b(stages, micros):
    """With M < P it waits longer, which is optimal, since P + M forwards and M + P gradients depend on one another."""
    assert bubble(SCHEDULES["zero_bubble_h1"], stages, micros) == max(stages - 1, 2 * stages - 1 - micros)


@pytest.mark.parametrize(("f", "d", "w"), [(1, 1, 1), (1, 1.25, 0.75), (2, 2, 1), (1, 2, 1)])
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_zero_bubble_h1_has_the_bubble_of_its_paper(stages, f, d, w):
    """This holds if no W takes longer than the gap that it fills."""
    found = bubble(SCHEDULES["zero_bubble_h1"], stages, 2 * stages, f=f, d=d, w=w)
    assert found == pytest.approx((stages - 1) * (f + d - w))


@pytest.mark.sample(16)
@sizes
def test_zero_bubble_v_waits_only_at_the_start(stages, micros):
    """The last stage starts P - 1 actions late. With M < P a stage also waits for its gradients."""
    expected = max(stages - 1, 3 * stages - 1 - 2 * micros, 4 * stages - 1 - 4 * micros)
    assert bubble(SCHEDULES["zero_bubble_v"], stages, micros) == expected


# -- receives --------------------------------------------------------------------------------------------------------


@schedules
@pytest.mark.parametrize(("stages", "micros"), [(2, 8), (4, 3), (4, 8), (8, 16)])
def test_receives_are_posted_before_their_sends(schedule, stages, micros):
    placement = schedule.placement(stages)
    lowered = lower(schedule.lists(stages, micros), placement, micros)
    machine = ScheduleSimulator(lowered, placement, Costs.uniform(placement.num_positions), is_lowered=True)
    machine.run()
    assert machine.sent_s.keys() == machine.posted_s.keys()
    for delivery, sent_s in machine.sent_s.items():
        assert machine.posted_s[delivery] <= sent_s + 1e-9, delivery


# -- parts -------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 60))
def test_rounds_have_at_least_one_micro_batch_per_stage_and_similar_sizes(stages, micros):
    found = round_sizes(stages, micros)
    assert sum(found) == micros
    assert found == sorted(found, reverse=True)
    assert found[0] - found[-1] <= 1
    assert found[-1] >= stages or len(found) == 1
    assert found[-1] < 2 * stages


def test_weight_gradients_run_at_the_memory_limit():
    kinds = (Kind.FORWARD, Kind.INPUT_GRADIENT)
    alternating = [Action(kind, 0, micro) for micro in range(4) for kind in kinds]
    (roomy,) = insert_weight_gradients([alternating], loop(1), max_inputs=9)
    (narrow,) = insert_weight_gradients([alternating], loop(1), max_inputs=2)
    assert "".join(action.kind.value for action in roomy) == "FIFIFIFIWWWW"
    assert "".join(action.kind.value for action in narrow) == "FIFIWFIWFIWW"


# -- schedules in files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generate", "placement"),
    [(one_f_one_b, loop(1)), (one_f_one_b, loop(4)), (interleaved, loop(3, 2)), (zero_bubble_v, v_placement(3))],
)
def test_written_schedules_are_read_again(generate, placement):
    lists = generate(placement.stages, placement.chunks, 5)
    assert read_csv(write_csv(lists, placement), "a.csv") == (placement, lists)


def test_blanks_and_overlapped_actions_are_read():
    placement, lists = read_csv("0F0, ,0F1,,(0F2;0B0)OVERLAP_F_B,0I1,0W1,0B2\r\n", "a.csv")
    f, b, d, w = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT
    words = [(f, 0), (f, 1), (f, 2), (b, 0), (d, 1), (w, 1), (b, 2)]
    assert placement == loop(1)
    assert lists == [[Action(kind, 0, micro) for kind, micro in words]]


def test_any_placement_is_read():
    placement, lists = read_csv("0F0,3F0,3B0,0B0\n2F0,2B0,1B0,1F0", "a.csv")
    assert placement.route == (0, 1, 1, 0)
    placement, lists = read_csv("1F0,2F0,2B0,1B0\n0F0,3F0,3B0,0B0", "a.csv")
    assert placement.route == (1, 0, 0, 1)
    assert [action.chunk for action in lists[1]] == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("0F0,0B0\n1F0,1SEND_B0,1B0", "a.csv:2:5 contains `1SEND_B0`, which must be a compute action"),
        ("0F0,0X0", "a.csv:1:5 contains `0X0`"),
        ("0F0,0B", "contains `0B`"),
        ("0F" + "9" * 5000, "contains `0F999"),
        (
            "0F0,0B0\n2F0,2B0",
            "must place each chunk of the model, numbered from 0, on exactly one rank (rank 0: [0]; rank 1: [2])",
        ),
        (
            "0F0,0B0\n0F1,0B1",
            "must place each chunk of the model, numbered from 0, on exactly one rank (rank 0: [0]; rank 1: [0])",
        ),
        ("0F0,0B0\n\n1F0,1B0", "the same number of chunks on every rank (rank 0: [0]; rank 1: []; rank 2: [1])"),
        ("", "a.csv has no actions"),
        (" , ,", "a.csv has no actions"),
    ],
)
def test_invalid_schedules_are_refused(text, fault):
    with pytest.raises(PlanError) as caught:
        read_csv(text, "a.csv")
    assert caught.value.diagnostics[0].code == "schedule-file"
    assert fault in caught.value.diagnostics[0].message


def test_a_file_is_refused_for_other_sizes(tmp_path):
    path = tmp_path / "v.csv"
    path.write_text(write_csv(zero_bubble_v(2, 2, 3), v_placement(2)), "utf-8")
    schedule = build_csv(CsvConfig(file=path))
    assert schedule.placement(2) == v_placement(2)
    assert schedule.lists(2, 3) == zero_bubble_v(2, 2, 3)
    with pytest.raises(PlanError, match="is for 2 stages, not for 3"):
        schedule.placement(3)
    for stages, micros in ((3, 3), (2, 4)):
        with pytest.raises(PlanError, match=rf"is for 2 stages and 3 microbatches, not for {stages} and {micros}"):
            schedule.lists(stages, micros)


# -- partitions --------------------------------------------------------------------------------------------------------


def loads(boundaries, costs) -> list[float]:
    return [sum(costs[first:end]) for first, end in pairwise(boundaries)]


def is_cut(boundaries, num_layers, num_positions) -> bool:
    ends = boundaries[0] == 0 and boundaries[-1] == num_layers
    return ends and len(boundaries) == num_positions + 1 and all(a < b for a, b in pairwise(boundaries))


def all_cuts(num_layers, num_positions):
    for inner in combinations(range(1, num_layers), num_positions - 1):
        yield (0, *inner, num_layers)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=9), st.data())
@settings(max_examples=100, deadline=None)
def test_the_cut_is_the_most_even_of_the_best(costs, data):
    num_positions = data.draw(st.integers(1, len(costs)))
    found = loads(balanced_boundaries(costs, num_positions), costs)
    cuts = [loads(cut, costs) for cut in all_cuts(len(costs), num_positions)]
    best = min((max(cut), sum(load * load for load in cut)) for cut in cuts)
    assert (max(found), sum(load * load for load in found)) == best


@given(st.integers(1, 40), st.integers(1, 40))
def test_uniform_positions_differ_by_one_layer_and_the_ends_are_small(num_layers, num_positions):
    if num_layers < num_positions:
        num_layers, num_positions = num_positions, num_layers
    found = uniform_boundaries(num_layers, num_positions)
    sizes = [end - first for first, end in pairwise(found)]
    assert is_cut(found, num_layers, num_positions)
    assert max(sizes) - min(sizes) <= 1
    if num_layers % num_positions < num_positions - 1:
        assert sizes[-1] == min(sizes)


@pytest.mark.parametrize(
    ("layers", "code", "words"),
    [
        ([3, 3, 3, 1], "partition-length", "`layers` must have 3 numbers .* but has 4"),
        ([3, 2, 3], "partition-layers", "must add up to the model's 9 layers, but adds up to 8"),
    ],
)
def test_a_wrong_explicit_cut_is_refused(layers, code, words):
    with pytest.raises(PlanError, match=words) as caught:
        build_explicit(ExplicitPartitionConfig(layers=layers))([1.0] * 9, 3)
    assert caught.value.diagnostics[0].code == code


@pytest.mark.parametrize("cut", [build_uniform(UniformPartitionConfig()), build_balanced(BalancedPartitionConfig())])
@pytest.mark.parametrize("num_layers", [0, 3])
def test_fewer_layers_than_positions_are_refused(cut, num_layers):
    with pytest.raises(PlanError, match=f"{num_layers} layers cannot be split into 4 chunks") as caught:
        cut([1.0] * num_layers, 4)
    assert caught.value.diagnostics[0].code == "partition-empty"


def test_costs_for_another_number_of_layers_are_refused():
    with pytest.raises(PlanError, match="`layer_costs` must have one number for each of the 4 layers, but has 1"):
        build_balanced(BalancedPartitionConfig(layer_costs=(1.0,)))([9, 1, 1, 1], 2)

"""Compares the schedules with those of torch.distributed.pipelining."""

from typing import Any

import pytest
from torch.distributed.pipelining import schedules as stock

from sley_core.actions.action import Action, Kind, Placement, loop, v_placement
from sley_core.actions.lower import lower
from sley_core.actions.simulate import Costs, simulate
from sley_pp.schedules import interleaved, read_csv, zero_bubble_h1, zero_bubble_v

Lists = list[list[Action]]

SIZES = [(stages, micros) for stages in (2, 3, 4, 8) for micros in range(1, 17)]
EQUAL_ROUNDS = [(stages, micros) for stages, micros in SIZES if micros % max(1, micros // stages) == 0]
"""What torch's interleaved schedules can do."""

sizes = pytest.mark.parametrize(("stages", "micros"), SIZES)
equal_rounds = pytest.mark.parametrize(("stages", "micros"), EQUAL_ROUNDS)


def stock_lists(kind: type, stages: int, chunks: int, micros: int) -> Lists:
    """Converts torch's lists by the texts of its actions. Its schedule is built without stages or groups."""
    maker: Any = object.__new__(kind)
    rounds = max(1, micros // stages)
    maker.__dict__.update(pp_group_size=stages, n_local_stages=chunks, _n_microbatches=micros)
    maker.__dict__.update(_num_stages=stages * chunks, num_stages=stages * chunks)
    maker.__dict__.update(number_of_rounds=rounds, microbatches_per_round=micros // rounds)
    if hasattr(maker, "_calculate_single_rank_operations"):
        rows = [maker._calculate_single_rank_operations(rank) for rank in range(stages)]
    else:
        rows = list(maker._get_pipeline_order().values())
    computes = [[one for one in row if one and one.computation_type is not stock.REDUCE_GRAD] for row in rows]
    text = "\n".join(",".join(map(str, row)) for row in computes)
    return read_csv(text, "torch")[1]


def without_weight_gradients(lists: Lists) -> Lists:
    return [[action for action in actions if action.kind is not Kind.WEIGHT_GRADIENT] for actions in lists]


def makespan(lists: Lists, placement: Placement, micros: int, link: float = 0.0) -> float:
    costs = Costs.uniform(placement.num_positions, link=link)
    return simulate(lower(lists, placement, micros), placement, costs).timeline.makespan_s


@pytest.mark.sample(16)
@equal_rounds
@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaved_equals_torch_where_torch_supports_it(stages, micros, chunks):
    theirs = stock_lists(stock.ScheduleInterleaved1F1B, stages, chunks, micros)
    assert interleaved(stages, chunks, micros) == theirs


@pytest.mark.sample(16)
@equal_rounds
def test_zero_bubble_h1_equals_torch(stages, micros):
    """Also for M < P, except for the order of weight gradients, which no stage waits for."""
    ours, theirs = (zero_bubble_h1(stages, 1, micros), stock_lists(stock.ScheduleInterleavedZeroBubble, stages, 1, micros))
    assert without_weight_gradients(ours) == without_weight_gradients(theirs)
    assert makespan(ours, loop(stages), micros) == makespan(theirs, loop(stages), micros)
    assert ours == theirs or micros < stages


@pytest.mark.sample(16)
@sizes
def test_zero_bubble_v_has_the_same_pattern_and_is_not_longer(stages, micros):
    """The order of weight gradients differs. With M < 2P - 1 torch computes them at once, while other stages wait."""
    placement = v_placement(stages)
    ours, theirs = zero_bubble_v(stages, 2, micros), stock_lists(stock.ScheduleZBVZeroBubble, stages, 2, micros)
    assert without_weight_gradients(ours) == without_weight_gradients(theirs)
    assert makespan(ours, placement, micros) <= makespan(theirs, placement, micros)
    if micros <= stages:
        assert makespan(ours, placement, micros) < makespan(theirs, placement, micros)
    if micros >= 2 * stages - 1:
        assert makespan(ours, placement, micros, link=0.5) == makespan(theirs, placement, micros, link=0.5)


def test_a_schedule_of_torch_can_be_read_and_run():
    """The schedule is DualPipeV, whose overlapped pairs run one after another."""
    lists = stock_lists(stock.ScheduleDualPipeV, 4, 2, 8)
    assert 2 * 8 * 3 < makespan(lists, v_placement(4), 8) < 2 * 8 * 3 + 9

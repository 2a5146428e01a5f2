"""`pp.measured` cuts a pipeline by the measured times of layers."""

from typing import Any

import pytest

from sley_core.errors import RunError
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict
from sley_testing.parity import assert_same_bits
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import RunRecord, record
from sley_trainer.run import Run

pytestmark = pytest.mark.timeout(180)

SLOW_S = 0.02
"""Much longer than the wake-up delay of a busy core."""
STAGES: Tables = {"pipeline": {"use": "pp.one_f_one_b"}, "partition": {"use": "pp.measured"}}
PLAN = small_plan(
    **STAGES,
    model={"factory": "dozing:layers", "options": {"seconds": [SLOW_S, SLOW_S, SLOW_S, 3 * SLOW_S], "dropout": 0.1}},
    data={"factory": "dozing:Samples"},
    loss={"factory": "dozing:SumOfSquares"},
    batch={"global_size": 2, "micro_size": 1},
    optimizer={"use": "core.sgd", "lr": 0.1},
    parallel={"pp": 2, "dp": 1},
    precision=None,
)


def record_costs(plan: Tables) -> tuple[RunRecord, list[str], Any]:
    """Returns the recorded run, the layers of this rank, and the costs in the resolved plan."""
    runs: list[Run] = []
    recorded = record(plan, 2, prepare=runs.append)
    return recorded, [layer.name for layer in runs[0].layers], runs[0].resolved_plan.partition.config.layer_costs


@pytest.mark.flaky(reruns=2)  # a busy machine makes layers slower, never faster
def test_measured_costs_balance_stages_and_change_no_bit(ranks: Any) -> None:
    """The weights and losses are those of a plan that has the same costs."""
    measured = ranks(2)(record_costs, PLAN)
    (_, first, costs), (_, second, second_costs) = measured
    assert costs == second_costs
    unit_s = min(costs)
    assert 3 * SLOW_S <= unit_s < 6 * SLOW_S, "F, I and W"
    assert [round(cost / unit_s) for cost in costs] == [1, 1, 1, 3]
    assert (len(first), len(second)) == (3, 1)
    written = changed(PLAN, partition={"use": "pp.measured", "layer_costs": (1.0, 1.0, 1.0, 3.0)})
    for (actual, *_), (expected, *_) in zip(measured, ranks(2)(record_costs, written), strict=True):
        assert [row["loss"] for row in actual.rows] == [row["loss"] for row in expected.rows]
        assert_same_bits(actual.initial_weights, expected.initial_weights)
        assert_same_bits(actual.weights, expected.weights)


def error_of(plan: Tables) -> str:
    with pytest.raises((RunError, ValueError)) as caught:
        record(plan, 1)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_all_ranks_report_an_error_of_a_measured_layer(ranks: Any) -> None:
    first, second = ranks(2)(error_of, changed(PLAN, model__options={"seconds": [0.0] * 3, "picky": True}))
    assert first == "ValueError: this layer takes nothing"
    assert second.startswith("RunError: ")
    assert "rank 0 could not time the layers: ValueError: this layer takes nothing" in second


def test_slices_of_sequences_are_not_measured() -> None:
    """Costs in the plan need no measurement."""
    data = {"use": "data.text", "source": "python-stdlib", "sequence": 24}
    tables = small_plan(**STAGES, parallel={"sp": 2, "pp": 2, "dp": 1}, sequence={"use": "isp.all_to_all"}, data=data)
    assert [problem.code for problem in check_plan(plan_from_dict(tables), 4)] == ["sequence-partition"]
    costs = {"use": "pp.measured", "layer_costs": [1.0] * 4}
    assert check_plan(plan_from_dict(tables | {"partition": costs}), 4) == []

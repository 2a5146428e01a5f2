"""A step takes the seconds of its exchanges and its update; unknown parts are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from sley_core.assemble import draft_model
from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_core.errors import PlanError
from sley_core.model.layers import Model
from sley_core.plan.load import plan_from_dict
from sley_core.plan.plan import Plan
from sley_estimate.machine.read import machine_from_dict
from sley_estimate.recorded import of_plan
from sley_estimate.seconds_of_plan import estimate_seconds
from sley_estimate.testing.machines import small_machine
from sley_testing.plans import changed, small_plan

DATA = {"use": "data.text", "source": "python-stdlib", "sequence": 24}


def plan_of(**changes: Any) -> dict[str, Any]:
    return small_plan(**{"data": DATA, "precision": {"compute": "fp32"}} | changes)


LINK = {"latency_s": 1e-4, "bandwidth": 1e9}
MACHINE = small_machine(device__kind="cpu", links={"ranks_per_host": 2, "same_host": LINK})


def seconds(tables: dict[str, Any], size: int, machine: dict[str, Any] = MACHINE) -> float:
    return estimate_seconds(plan_from_dict(tables), size, machine_from_dict(machine)).step.seconds


def draft(plan: Plan) -> Model:
    return draft_model(plan, open_dataset(plan.data, DataContext(0, "train")).info)


@pytest.mark.parametrize("handler", ["core.each", "dp.bucketed", "dp.sharded"])
def test_a_slower_link_makes_a_step_longer_with_every_reducer(handler: str) -> None:
    plan = plan_of(parallel={"dp": 2}, gradient_handlers=[{"use": handler}])
    slow = changed(MACHINE, links__same_host=LINK | {"bandwidth": 1e6})
    assert seconds(plan, 2, slow) > 1.1 * seconds(plan, 2)


@pytest.mark.parametrize(
    ("changes", "size", "says"),
    [
        ({"parallel": {"dp": 4}}, 4, r"no `\[links.other_host\]`"),
        ({"precision": {"compute": "bf16"}}, 1, r"no `\[device.matmul.bf16\]`"),
    ],
)
def test_what_is_not_known_is_refused(changes: dict[str, Any], size: int, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        seconds(plan_of(**changes), size)


def test_estimates_are_made_where_no_plan_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written, and no process group is left."""
    monkeypatch.chdir(tmp_path)
    assert seconds(plan_of(parallel={"pp": 2, "dp": 1}, pipeline={"use": "pp.one_f_one_b"}), 2) > 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("dp", "reduced"), [(1, {}), (2, {"gradient_handlers": [{"use": "dp.bucketed"}]})])
def test_all_that_stages_have_is_updated_whether_or_not_it_is_reduced(dp: int, reduced: dict[str, Any]) -> None:
    """By AdamW in fp32: the gradient is read twice, weight and two states are read and written."""
    staged = {"parallel": {"pp": 2, "dp": dp}, "pipeline": {"use": "pp.one_f_one_b"}}
    plan = plan_from_dict(plan_of(**staged, optimizer={"use": "core.adamw", "lr": 1e-3}, **reduced))
    parameters = {p for layer in draft(plan).layers for p in layer.module.parameters()}
    at_once = changed(MACHINE, links__ranks_per_host=4, device__launch_s=0.0)
    moved_bytes = 4 * (2 + 2 * 3) * sum(p.numel() for p in parameters)
    found = estimate_seconds(plan, 2 * dp, machine_from_dict(at_once)).step
    assert sum(found.updating_s) == pytest.approx(moved_bytes / MACHINE["device"]["memory_bandwidth"], rel=0.05)


@pytest.mark.sample(2)
@pytest.mark.parametrize("handler", ["dp.sharded", "dp.bucketed"])
@pytest.mark.parametrize("schedule", ["one_f_one_b", "interleaved", "zero_bubble_h1", "zero_bubble_v"])
def test_alike_stages_take_what_each_would_by_its_own_steps(schedule: str, handler: str) -> None:
    tables = plan_of(
        model__num_layers=10,
        batch={"global_size": 16, "micro_size": 1},
        parallel={"pp": 4, "dp": 2},
        pipeline={"use": f"pp.{schedule}"},
        partition={"use": "pp.uniform"},
        gradient_handlers=[{"use": handler, "bucket_mb": 0.02}],
    )
    slow = changed(MACHINE, links={"ranks_per_host": 8, "same_host": LINK | {"bandwidth": 1e7}})
    with patch.object(of_plan, "each_rank", wraps=of_plan.each_rank) as looked:
        together = seconds(tables, 8, slow)
    assert len(looked.call_args.args[1]) < 4, "some stages are alike"
    with patch.object(of_plan, "representatives", lambda plan, topology, draft: [(one,) for one in range(topology.pp)]):
        assert together == pytest.approx(seconds(tables, 8, slow), rel=1e-9)

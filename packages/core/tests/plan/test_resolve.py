"""A valid plan resolves to values with origins: what is left out is written in, and every plugin that it names is there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sley_core.errors import PlanError
from sley_core.plan.document import Origin
from sley_core.plan.load import load_plan, plan_from_dict, plan_from_text
from sley_core.plan.loader import Loader
from sley_core.plan.plan import Plan

Make = Callable[..., Plan]


def test_what_is_left_out_is_written_in(make: Make) -> None:
    plan = make()
    assert (plan.run.seed, plan.run.device, plan.precision.gradients, plan.limits.start_timeout_s) == (
        (0, "auto", "fp32", 120.0)
    )
    assert (plan.evaluation, plan.profile) == (None, None)
    single = (plan.model, plan.data, plan.loss, plan.optimizer, plan.learning_rate, plan.activations)
    assert [one.name for one in (*single, *plan.gradient_handlers, *plan.scheduler_hooks, *plan.metrics)] == [
        "models.llama",
        "data.text",
        "core.cross_entropy",
        "core.adamw",
        "core.constant",
        "core.keep",
        "core.each",
        "core.jsonl",
    ]
    assert list(plan.plugins) == ["core", "models", "data"]


def test_gradients_follow_fp64(make: Make) -> None:
    assert make(precision={"compute": "fp64"}).precision.gradients == "fp64"
    assert make(precision={"compute": "fp64", "gradients": "fp32"}).precision.gradients == "fp32"


@pytest.mark.parametrize(
    ("parallel", "handlers"),
    [({"dp": 2}, ["core.each"]), ({"dp": 1}, []), ({}, ["core.each"]), ({"dp": 1, "sp": 2}, ["core.each"])],
)
def test_a_reducer_is_written_in_where_ranks_may_share_weights(make: Make, parallel: Any, handlers: list[str]) -> None:
    assert [one.name for one in make(parallel=parallel).gradient_handlers] == handlers
    assert make(parallel=parallel, gradient_handlers=[]).gradient_handlers == ()


def test_every_value_has_an_origin(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    plan = load_plan(path, ["optimizer.eps=1e-6"])
    assert plan.folder == tmp_path
    assert str(plan.origins["run", "steps"]) == f"{path}:5:1"
    assert str(plan.origins["optimizer", "eps"]) == "--set #1"
    assert plan.origins["optimizer", "weight_decay"] == Origin("default")
    assert plan.origins["loss", "use"] == Origin("core")
    assert plan.origins["gradient_handlers", 0, "use"] == Origin("core")
    assert plan.origins["plan",].kind == "file"
    assert plan.origins["source_folder",].kind == "default"


def test_a_partial_table_keeps_its_default_record(make: Make) -> None:
    plan = make(loss={"label_smoothing": 0.1})
    assert (plan.loss.name, plan.loss.config.label_smoothing) == ("core.cross_entropy", 0.1)


def test_a_factory_has_a_path_and_options(make: Make) -> None:
    plan = make(model={"factory": "my.models:small", "options": {"depth": 2}, "compile": True})
    assert (plan.model.name, plan.model.record) == ("my.models:small", None)
    assert plan.model.config.options == {"depth": 2}
    with pytest.raises(PlanError, match="must be a path to code"):
        make(model={"factory": "my.models"})
    with pytest.raises(PlanError, match="takes no `factory`"):
        make(activations={"factory": "my.models:policy"})


def test_plugins_are_those_of_every_record_reference_in_order(make: Make, loader: Loader) -> None:
    plan = make(
        metrics=[{"use": "core.jsonl"}, {"use": "pools.csv"}],
        scheduler_hooks=[{"use": "handlers.borrower", "pool": "pools.arena", "more": ["pools.arena"]}],
    )
    assert list(plan.plugins) == ["core", "models", "data", "handlers", "pools"]
    assert plan.loader.record("memory_pools", "pools.arena").name == "arena"


def test_numbers_are_no_references(make: Make) -> None:
    plan = make(scheduler_hooks=[{"use": "handlers.borrower", "sizes": [1.0, 2.0]}])
    assert plan.scheduler_hooks[0].config.sizes == (1.0, 2.0)
    assert list(plan.plugins) == ["core", "models", "data", "handlers"]


def test_a_dict_needs_no_text(tables: dict[str, Any], text: str, tmp_path: Path) -> None:
    assert plan_from_dict(tables) == plan_from_text(text)
    with pytest.raises(PlanError) as caught:
        plan_from_dict({**tables, "batch": {"global_size": 1.5, "micro_size": None}})
    assert [str(found) for found in caught.value.diagnostics] == [
        "<tables>: error[wrong-type]: `batch.global_size` must be an integer of at least 1, not 1.5",
        "<tables>: error[missing-key]: [batch] needs `micro_size`, an integer of at least 1\n"
        "hint: Samples per forward on one rank.",
    ]
    plan = plan_from_dict({**tables, "data": {"use": "data.text", "files": [Path("a.txt")], "sequence": 8}}, tmp_path)
    assert plan.data.config.files == (tmp_path / "a.txt",)


def test_loading_and_checking_a_plan_needs_no_torch(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    program = (
        "import sys\n"
        "import sley_testing.plan_reference\n"
        "from sley_core.plan.load import load_plan\n"
        "from sley_core.plan.check import check_plan\n"
        "plan = load_plan(sys.argv[1])\n"
        "assert check_plan(plan, plan.world()) == []\n"
        "print('torch' in sys.modules)\n"
    )
    command = [sys.executable, "-c", program, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("False", "")

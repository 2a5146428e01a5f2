"""A resolved plan written as text loads to an equal plan, wherever the text lies."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sley_core.errors import PlanError, format_path
from sley_core.plan.load import load_plan, plan_from_dict, plan_from_text
from sley_core.plan.plan import Plan, check_changes, compare_plans
from sley_testing.plans import small_plan


def test_a_resolved_plan_stands_anywhere(tmp_path: Path, text: str) -> None:
    (tmp_path / "plans").mkdir()
    path = tmp_path / "plans" / "plan.toml"
    path.write_text(text.replace('source = "python-stdlib"', 'files = ["corpus/*.txt", "../more.txt"]'))
    plan = load_plan(path)
    resolved = tmp_path / "plan.toml"
    resolved.write_text(plan.to_toml())
    again = load_plan(resolved)
    assert again == plan
    assert again.folder == tmp_path / "plans"
    assert again.data.config.files == (tmp_path / "plans/corpus/*.txt", tmp_path / "plans/../more.txt")
    assert 'files = ["corpus/*.txt", "../more.txt"]' in plan.to_toml()


def test_the_digest_is_of_what_runs(make: Callable[..., Plan], tables: dict[str, Any], text: str) -> None:
    digest = make().digest
    assert plan_from_text(text + "[loss]\n", folder=Path("/somewhere")).digest == digest
    assert plan_from_dict({**dict(reversed(tables.items())), "precision": {"compute": "fp32"}}).digest == digest
    assert make(run={**tables["run"], "seed": 1}).digest != digest


def resolved(folder: Path, **changed: Any) -> str:
    return plan_from_dict(small_plan(**changed), folder).to_toml()


def test_layout_and_rates_may_change_when_a_run_resumes(texts: Path) -> None:
    assert compare_plans(resolved(texts), resolved(texts, run__name="another")) == []
    found = compare_plans(
        resolved(texts), resolved(texts, parallel={"dp": 2}, optimizer__lr=0.5, evaluation={"every": 5, "steps": 1})
    )
    check_changes(found)
    assert [one.path for one in found[:2]] == [("parallel", "dp"), ("optimizer", "lr")]
    assert {one.old for one in found[2:]} == {"nothing"}


@pytest.mark.parametrize(
    ("changed", "keys"),
    [
        ({"model__num_layers": 3}, ["model.num_layers"]),
        ({"data__sequence": 8}, ["data.sequence"]),
        ({"run__seed": 99}, ["run.seed"]),
        ({"optimizer": {"use": "core.sgd", "lr": 0.1}}, ["optimizer.use"]),
        ({"model": {"factory": "mine:layers", "options": {"width": 8}}}, ["model.use", "model.factory"]),
    ],
)
def test_a_change_that_makes_other_numbers_is_refused(texts: Path, changed: Any, keys: list[str]) -> None:
    with pytest.raises(PlanError, match="resume-differs") as caught:
        check_changes(compare_plans(resolved(texts), resolved(texts, **changed)))
    assert [format_path(found.path) for found in caught.value.diagnostics] == keys

"""A plan's components build what they name, it knows its world, and a run can write what it found into it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sley_core.errors import PlanError
from sley_core.plan.document import Origin
from sley_core.plan.load import plan_from_dict, plan_from_text, with_values
from sley_core.plan.plan import Plan

Make = Callable[..., Plan]
Failure = Callable[..., str]

CODE = """\
import sys

def loss(scale=1): return ("loss", scale)
def data(context, size): return (context, size)
def fails(): raise KeyError("inside")
def ends(): sys.exit(3)
def lacks(): import nowhere_at_all

class Outer:
    @staticmethod
    def inner(): return 7

number = 3
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module `my_own_parts`."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_own_parts", raising=False)
    (tmp_path / "my_own_parts.py").write_text(CODE)
    (tmp_path / "my_broken_parts.py").write_text("raise SystemExit(2)")
    return tmp_path


@pytest.fixture
def failure(tables: dict[str, Any], code: Path) -> Failure:
    """Code and message of the error of a loss, given as a table."""

    def of(**loss: Any) -> str:
        with pytest.raises(PlanError) as caught:
            plan_from_dict({**tables, "loss": loss}, code).loss.build()
        return f"{caught.value.diagnostics[0].code}: {caught.value.diagnostics[0].message}"

    return of


def test_a_factory_gets_its_options_and_what_it_names(tables: dict[str, Any], code: Path) -> None:
    def build(key: str, table: dict[str, Any], *args: Any) -> Any:
        return getattr(plan_from_dict({**tables, key: table}, code), key).build(*args)

    assert build("loss", {"factory": "my_own_parts:loss"}) == ("loss", 1)
    assert build("loss", {"factory": "my_own_parts:loss", "options": {"scale": 3}}) == ("loss", 3)
    assert build("loss", {"factory": "my_own_parts:Outer.inner"}) == 7
    assert build("data", {"factory": "my_own_parts:data", "options": {"size": 4}}, "context") == ("context", 4)


def test_what_can_be_wrong_with_a_factory(failure: Failure, code: Path) -> None:
    where = code / "my_own_parts.py"
    missing = f"factory-import: cannot import `my_own_parts:los`: {where} has no `los`"
    assert failure(factory="my_own_parts:los") == missing
    assert "factory-import: cannot import `my_own_part:loss`: ModuleNotFound" in failure(factory="my_own_part:loss")
    assert "cannot import `my_broken_parts:loss`: SystemExit: 2" in failure(factory="my_broken_parts:loss")
    assert failure(factory="my_own_parts:number").endswith("is a int, which cannot be called")
    assert failure(factory="my_own_parts:loss", options={"skale": 1}).startswith("factory-options: ")
    assert failure(factory="my_own_parts:fails") == (
        f"factory-failed: `my_own_parts:fails` failed: KeyError: 'inside' ({where}:5)"
    )
    assert "failed: SystemExit: 3" in failure(factory="my_own_parts:ends")


def test_a_factory_that_needs_a_package_names_it(tables: dict[str, Any], code: Path) -> None:
    with pytest.raises(PlanError, match=r"factory-failed.* No module named 'nowhere_at_all'") as caught:
        plan_from_dict({**tables, "loss": {"factory": "my_own_parts:lacks"}}, code).loss.build()
    assert caught.value.diagnostics[0].hint == "install what has `nowhere_at_all`"


def test_a_project_beside_its_environment_is_still_the_users(
    failure: Failure, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for prefix in ("prefix", "base_prefix"):
        monkeypatch.setattr(sys, prefix, str(code)[:-1])
    assert f"({code / 'my_own_parts.py'}:5)" in failure(factory="my_own_parts:fails")


def test_what_a_run_passes_is_no_option(tables: dict[str, Any], code: Path) -> None:
    table = {"factory": "my_own_parts:data", "options": {"size": 4, "context": 1}}
    with pytest.raises(PlanError, match="`context` is what a run passes itself"):
        plan_from_dict({**tables, "data": table}, code).data.build("the context")


def test_a_failing_factory_is_placed_at_its_key(text: str) -> None:
    plan = plan_from_text(text + "[loss]\nfactory = 'no_such_module_here:loss'\n")
    with pytest.raises(PlanError) as caught:
        plan.loss.build()
    assert str(caught.value).startswith("plan.toml:29:11: error[factory-import]: ")
    assert caught.value.diagnostics[0].source_line == "factory = 'no_such_module_here:loss'"


def test_values_found_by_a_run_can_be_written_in(text: str, tmp_path: Path) -> None:
    plan = plan_from_text(text.replace("plan = 1", 'plan = 1\nsource_folder = "sub"'), folder=tmp_path)
    changed = with_values(plan, {("data", "samples_per_epoch"): 100, ("evaluation", "every"): 5})
    assert changed.data.config.samples_per_epoch == 100
    assert changed.evaluation
    assert changed.evaluation.every == 5
    assert changed.folder == plan.folder == tmp_path / "sub"
    assert changed.origins["run", "steps"] == plan.origins["run", "steps"]
    assert changed.origins["data", "samples_per_epoch"] == Origin("core")
    unchanged = with_values(plan, {("run", "steps"): plan.run.steps})
    assert unchanged.origins == plan.origins, "what is found to be as it was said is the user's word still"
    assert plan.data.config.samples_per_epoch is None
    assert changed.digest != plan.digest
    with pytest.raises(PlanError, match=r"`data.samples_per_epoch` must be an integer"):
        with_values(plan, {("data", "samples_per_epoch"): 0})


@pytest.mark.parametrize(
    ("parallel", "available", "world"),
    [
        ({"dp": 4}, None, 4),
        ({"dp": 4}, 8, 4),
        ({"dp": 2, "pp": 2, "sp": 3}, 1, 12),
        ({}, None, 1),
        ({}, 6, 6),
        ({"dp": "auto", "pp": 2, "sp": 2}, None, 4),
        ({"pp": 2, "sp": 2, "wp": 4}, None, 8),
        ({"wp": 3, "sp": 2}, None, 6),
    ],
)
def test_the_world_of_a_plan(make: Make, parallel: Any, available: int | None, world: int) -> None:
    plan = make(parallel=parallel)
    assert plan.world(available) == world
    if available is None:
        assert plan.topology(world).world == world

"""Plans that a program writes: the file says what was asked for, and nothing is written that would not run."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli

from sley_core.errors import PlanError, UsageError
from sley_core.plan.build import draft
from sley_core.plan.load import load_plan, plan_from_dict
from sley_testing.plans import small_plan, write_texts


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "plans").mkdir()
    write_texts(tmp_path / "plans")
    path = tmp_path / "plans" / "base.toml"
    draft(**small_plan(optimizer={"use": "core.adamw", "lr": 1e-3, "betas": [0.9, 0.99]})).write(path)
    return path


def test_a_plan_that_stands_alone_is_the_one_that_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    write_texts(tmp_path / "new")
    tables = small_plan(batch={"global_size": 6, "micro_size": 3}, gradient_handlers=[{"use": "core.each"}])
    written = draft(**tables).write(tmp_path / "new" / "plan.toml")
    loaded = load_plan(tmp_path / "new" / "plan.toml")
    assert written == loaded
    assert loaded.digest == plan_from_dict(tables, tmp_path / "new").digest
    assert loaded.batch.micro_size == 3


def test_a_sweep_says_what_it_changes(base: Path, tmp_path: Path) -> None:
    sweep = draft(base, run={"steps": 7})
    for lr in (0.1, 0.2):
        path = tmp_path / "sweep" / f"{lr}.toml"
        plan = sweep.set(run={"name": f"lr-{lr}"}, optimizer={"lr": lr}).write(path)
        assert (plan.run.name, plan.run.steps, plan.optimizer.config.lr) == (f"lr-{lr}", 7, lr)
        assert plan.optimizer.config.betas == (0.9, 0.99), "of the base"
        said = tomli.loads(path.read_text())
        assert said == {
            "plan": 1,
            "extends": "../plans/base.toml",
            "run": {"steps": 7, "name": f"lr-{lr}"},
            "optimizer": {"lr": lr},
        }
        assert load_plan(path).digest == plan.digest
    assert sweep.tables == {"run": {"steps": 7}}, "a draft is not changed"


def test_another_record_takes_the_place_of_the_first(base: Path, tmp_path: Path) -> None:
    one = draft(base, optimizer={"use": "core.adamw", "lr": 0.1, "eps": 1e-6})
    plan = one.set(optimizer={"use": "core.sgd", "lr": 0.3}).write(tmp_path / "sgd.toml")
    assert plan.optimizer.name == "core.sgd"
    assert "eps" not in (tmp_path / "sgd.toml").read_text()


@pytest.mark.parametrize(
    ("tables", "world", "code", "words"),
    [
        ({"run": {"stepps": 5}}, None, "unknown-key", "wrong.toml:"),
        ({"batch": {"global_size": 7, "micro_size": 2}}, None, "batch-does-not-divide", "wrong.toml:"),
        ({"parallel": {"dp": 2}}, 3, "layout", "3 != 1 x 2 x 1"),
    ],
)
def test_a_plan_that_would_not_run_is_not_written(
    base: Path, tmp_path: Path, tables: dict[str, object], world: int | None, code: str, words: str
) -> None:
    with pytest.raises(PlanError) as caught:
        draft(base, **tables).write(tmp_path / "wrong.toml", world=world)
    assert caught.value.diagnostics[0].code == code
    assert words in str(caught.value)
    assert not (tmp_path / "wrong.toml").exists()


@pytest.mark.parametrize("value", [None, object(), {"inner": None}])
def test_what_toml_has_no_form_for_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(UsageError, match=r"`run\.name"):
        draft(run={"name": value}).write(tmp_path / "plan.toml")

"""A small plan with changes is a plan of its own, and its text is there."""

from __future__ import annotations

from pathlib import Path

from sley_core.plan.load import plan_from_dict
from sley_testing.plans import changed, small_plan
from sley_testing.runs import record


def test_the_small_plan_trains_on_the_texts_and_evaluates(texts: Path) -> None:
    recorded = record(small_plan(evaluation={"every": 2, "steps": 1}), 3, folder=texts)
    losses = [row["loss"] for row in recorded.rows]
    assert losses[0] > losses[1] > losses[2]
    assert recorded.held_out is not None


def test_changes_set_keys_and_tables_and_none_removes_them() -> None:
    tables = small_plan(batch__micro_size=1, parallel__dp=2, model={"factory": "own:layers"}, optimizer__clip_norm=None)
    assert tables["batch"] == {"global_size": 8, "micro_size": 1}
    assert tables["parallel"] == {"dp": 2}
    assert tables["model"] == {"factory": "own:layers"}
    assert "clip_norm" not in tables["optimizer"]
    assert "precision" not in changed(tables, precision=None)
    assert plan_from_dict(tables).batch.micro_size == 1


def test_a_changed_plan_shares_nothing_with_another() -> None:
    handlers = [{"use": "core.each"}]
    first = small_plan(gradient_handlers=handlers)
    second = changed(first)
    second["gradient_handlers"][0]["use"] = "other"
    second["model"]["hidden"] = 1
    assert handlers == first["gradient_handlers"] == [{"use": "core.each"}]
    assert first["model"] == small_plan()["model"]

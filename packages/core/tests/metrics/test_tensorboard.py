"""Curves for TensorBoard, read back with TensorBoard's own reader; what a plan's writers lack."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from sley_core.metrics import config
from sley_core.metrics.config import TensorboardConfig, check_metrics
from sley_core.metrics.writers import TensorboardWriter
from sley_core.plan.load import plan_from_dict
from sley_core.plan.plan import Plan
from sley_core.protocols import MetricsWriter
from sley_testing.plans import small_plan


def test_every_number_is_a_point_of_its_curve(tmp_path: Path) -> None:
    writer = TensorboardWriter(TensorboardConfig(), tmp_path)
    assert isinstance(writer, MetricsWriter)
    for step in (1, 2):
        writer.write({"step": step, "loss": 6.0 - step, "tokens": 4096})
    writer.close()
    curves = EventAccumulator(str(tmp_path / "tensorboard"))
    curves.Reload()
    assert curves.Tags()["scalars"] == ["loss", "tokens"]
    assert [(point.step, point.value) for point in curves.Scalars("loss")] == [(1, 5.0), (2, 4.0)]
    assert [point.value for point in curves.Scalars("tokens")] == [4096.0, 4096.0]


def plan_with(*writers: str) -> Plan:
    return plan_from_dict(small_plan(metrics=[{"use": writer} for writer in writers]))


def test_both_writers_may_be_listed() -> None:
    assert list(check_metrics(plan_with("core.jsonl", "core.tensorboard"))) == []


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "find_spec", lambda name: None)
    (problem,) = check_metrics(plan_with("core.jsonl", "core.tensorboard"))
    assert (problem.code, problem.path) == ("tensorboard-missing", ("metrics", 1, "use"))
    assert problem.hint is not None
    assert problem.hint.endswith('in a clone of Sley\'s repository: `pip install -e "packages/core[tensorboard]"`')


def test_a_writer_that_is_listed_twice_is_refused() -> None:
    (problem,) = check_metrics(plan_with("core.jsonl", "core.tensorboard", "core.jsonl"))
    assert (problem.code, problem.path) == ("metrics-twice", ("metrics", 2))

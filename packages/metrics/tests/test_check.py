"""Plans with these writers: a package that is not installed, and a writer that is listed twice."""

from __future__ import annotations

from typing import Any

import pytest

from sley_core.api.plan import Plan
from sley_core.plan.load import plan_from_dict
from sley_metrics import config
from sley_metrics.config import check_metrics
from sley_testing.plans import small_plan

JSONL = {"use": "core.jsonl"}
TENSORBOARD = {"use": "metrics.tensorboard"}
WANDB = {"use": "metrics.wandb", "project": "p"}


def plan_with(*writers: dict[str, Any]) -> Plan:
    return plan_from_dict(small_plan(metrics=list(writers)))


@pytest.mark.parametrize("writer", [TENSORBOARD, WANDB])
def test_a_missing_package_is_named_with_the_command(writer: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "find_spec", lambda name: None)
    (problem,) = check_metrics(plan_with(JSONL, writer))
    name = writer["use"].removeprefix("metrics.")
    assert (problem.code, problem.path) == (f"{name}-missing", ("metrics", 1, "use"))
    assert problem.hint is not None
    assert problem.hint.endswith(f'in a clone of Sley\'s repository: `pip install -e "packages/metrics[{name}]"`')


@pytest.mark.parametrize("writer", [TENSORBOARD, WANDB])
def test_a_writer_that_is_listed_twice_is_refused(writer: dict[str, Any]) -> None:
    (problem,) = check_metrics(plan_with(writer, JSONL, writer))
    assert (problem.code, problem.path) == ("metrics-twice", ("metrics", 2))

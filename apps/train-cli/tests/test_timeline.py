"""The drawing of a pipeline's step, from a schedule that no package of ours has."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from sley_core.actions.action import Action, Kind, Schedule
from sley_core.errors import PlanError
from sley_core.hookspecs import hookimpl
from sley_core.plan.load import plan_from_dict
from sley_core.plan.loader import Loader
from sley_core.records import PartitionerRecord, Record, ScheduleRecord, StageLinkRecord
from sley_core.table import Table
from sley_testing.plans import loader_of, small_plan
from train_cli.commands.show import timeline_lines


class Nothing(Table):
    """A table without keys."""


def all_forward(stages: int, chunks: int, micros: int) -> list[list[Action]]:
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return [[Action(kind, 0, micro) for kind in kinds for micro in range(micros)] for _ in range(stages)]


@hookimpl
def sley_records() -> list[Record]:
    return [
        ScheduleRecord(name="waves", config=Nothing, build="waves_of_a_test:build"),
        PartitionerRecord(name="even", config=Nothing, build="waves_of_a_test:even"),
        StageLinkRecord(name="link", config=Nothing, build="waves_of_a_test:Link"),
    ]


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Loader:
    module = ModuleType("waves_of_a_test")
    module.build = lambda config: Schedule(all_forward)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return loader_of({"waves": SimpleNamespace(sley_records=sley_records)})


def tables(**pipeline: object) -> dict[str, object]:
    return small_plan(**{"batch": {"global_size": 3, "micro_size": 1}, "gradient_handlers": [], **pipeline})


def test_stages_stand_one_below_the_other(loader: Loader) -> None:
    pipeline = {"parallel": {"dp": 1, "pp": 2}, "pipeline": {"use": "waves.waves"}, "partition": {"use": "waves.even"}}
    plan = plan_from_dict(tables(**pipeline), loader=loader)
    drawn = "\n".join(timeline_lines(plan, plan.topology(2)))
    assert "stage 0  F0-F1-F2-" in drawn
    assert "stage 1: idle" in drawn
    assert "2 stages, 3 micro-batches; F, I and W take" in drawn
    assert "holds at most 3 micro-batches" in drawn


def test_without_a_pipeline_there_is_none(loader: Loader) -> None:
    plan = plan_from_dict(tables(), loader=loader)
    with pytest.raises(PlanError, match="no \\[pipeline\\]"):
        list(timeline_lines(plan, plan.topology(1)))

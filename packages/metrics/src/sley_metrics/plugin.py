"""Declares the records of the plugin `metrics`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sley_core.hookspecs import hookimpl
from sley_core.records import MetricsWriterRecord, Problem
from sley_metrics.config import TensorboardConfig, WandbConfig, check_metrics

if TYPE_CHECKING:
    from sley_core.api.plan import Plan


@hookimpl
def sley_records() -> list[MetricsWriterRecord]:
    writers = "sley_metrics.writers"
    return [
        MetricsWriterRecord(name="tensorboard", config=TensorboardConfig, build=f"{writers}:TensorboardWriter"),
        MetricsWriterRecord(name="wandb", config=WandbConfig, build=f"{writers}:WandbWriter"),
    ]


@hookimpl
def sley_check_plan(plan: Plan) -> Iterator[Problem]:
    """Yields a problem for each writer whose package is not installed or that the plan lists twice."""
    yield from check_metrics(plan)

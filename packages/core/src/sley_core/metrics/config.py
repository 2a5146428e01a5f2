"""The table of `core.jsonl`, and its check. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sley_core.records import Problem
from sley_core.table import Table

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan


class JsonlConfig(Table):
    """One JSON object per optimizer step, in `metrics.jsonl` of the run's folder."""


def check_metrics(plan: Plan) -> Iterable[Problem]:
    """Yields a problem for each further listing of `core.jsonl`."""
    listed = [index for index, writer in enumerate(plan.metrics) if isinstance(writer.config, JsonlConfig)]
    for index in listed[1:]:
        name = plan.metrics[index].name
        yield Problem(("metrics", index), f"`{name}` is listed twice", "leave one out", "metrics-twice")

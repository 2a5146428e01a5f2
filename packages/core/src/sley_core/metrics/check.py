"""Checks a plan's metrics writers without torch and before any process starts."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from sley_core.discovery import CORE, to_install
from sley_core.metrics.config import JsonlConfig, TensorboardConfig
from sley_core.records import Problem

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan


def check_metrics(plan: Plan) -> Iterable[Problem]:
    """Yields a problem for `core.tensorboard` without its package, and for a writer of core's that is listed twice."""
    seen: set[str] = set()
    for index, writer in enumerate(plan.metrics):
        if not isinstance(writer.config, JsonlConfig | TensorboardConfig):
            continue
        if writer.name in seen:
            yield Problem(("metrics", index), f"`{writer.name}` is listed twice", "leave one out", "metrics-twice")
        elif isinstance(writer.config, TensorboardConfig) and find_spec("tensorboard") is None:
            yield Problem(
                ("metrics", index, "use"),
                "`core.tensorboard` needs the package `tensorboard`, which is not installed",
                to_install(CORE, "tensorboard"),
                "tensorboard-missing",
            )
        seen.add(writer.name)

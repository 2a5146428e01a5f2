"""Checks a plan's metrics writers without torch and before any process starts."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from sley_core.discovery import CORE, to_install
from sley_core.metrics.config import JsonlConfig, TensorboardConfig, WandbConfig
from sley_core.records import Problem
from sley_core.table import Table

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan


_PACKAGES: dict[type[Table], str] = {TensorboardConfig: "tensorboard", WandbConfig: "wandb"}
"""What a writer of core's needs beside core: a package, and an extra of the same name."""


def check_metrics(plan: Plan) -> Iterable[Problem]:
    """Yields a problem for a writer of core's without its package, and for one that is listed twice."""
    seen: set[str] = set()
    for index, writer in enumerate(plan.metrics):
        if not isinstance(writer.config, JsonlConfig | TensorboardConfig | WandbConfig):
            continue
        package = _PACKAGES.get(type(writer.config))
        if writer.name in seen:
            yield Problem(("metrics", index), f"`{writer.name}` is listed twice", "leave one out", "metrics-twice")
        elif package is not None and find_spec(package) is None:
            yield Problem(
                ("metrics", index, "use"),
                f"`{writer.name}` needs the package `{package}`, which is not installed",
                to_install(CORE, package),
                f"{package}-missing",
            )
        seen.add(writer.name)

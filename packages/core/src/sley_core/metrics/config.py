"""The tables of core's metrics writers, and their checks. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from sley_core.discovery import CORE, to_install
from sley_core.records import Problem
from sley_core.table import Positive, Table

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan


class JsonlConfig(Table):
    """One JSON object per optimizer step, in `metrics.jsonl` of the run's folder."""


class TensorboardConfig(Table):
    """Curves for TensorBoard, in the folder `tensorboard` of the run's folder; needs `sley-core[tensorboard]`."""

    flush_s: Positive = 10
    """Seconds after which a new point is in the file at the latest."""


class WandbConfig(Table):
    """Curves for Weights & Biases, one run there per run; needs `sley-core[wandb]`."""

    project: str
    """The project at Weights & Biases."""

    entity: str | None = None
    """The user or team that owns the project; left out, the one that the API key belongs to."""

    mode: Literal["online", "offline"] = "online"
    """Offline rows are kept in the folder `wandb` of the run's folder, for `wandb sync`."""

    tags: tuple[str, ...] = ()
    """Tags of the run."""


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

"""The tables of `metrics.tensorboard` and `metrics.wandb`, and their check. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Literal

from sley_core.api.plan import Plan, Positive, Table
from sley_core.records import Problem


class TensorboardConfig(Table):
    """Curves for TensorBoard, in the folder `tensorboard` of the run's folder; needs `sley-metrics[tensorboard]`."""

    flush_s: Positive = 10
    """Seconds after which a new point is in the file at the latest."""


class WandbConfig(Table):
    """Curves for Weights & Biases, with a run there for each run of Sley; needs `sley-metrics[wandb]`."""

    project: str
    """The project at Weights & Biases."""

    entity: str | None = None
    """The user or team that owns the project; left out, the owner of the API key."""

    mode: Literal["online", "offline"] = "online"
    """Offline rows are kept in the folder `wandb` of the run's folder, for `wandb sync`."""

    tags: tuple[str, ...] = ()
    """Tags of the run."""


def check_metrics(plan: Plan) -> Iterator[Problem]:
    """Yields a problem for a writer of this package whose extra is not installed, and for one that is listed twice."""
    seen: set[str] = set()
    for index, writer in enumerate(plan.metrics):
        if not isinstance(writer.config, TensorboardConfig | WandbConfig):
            continue
        package = "tensorboard" if isinstance(writer.config, TensorboardConfig) else "wandb"
        if package in seen:
            yield Problem(("metrics", index), f"`{writer.name}` is listed twice", "leave one out", "metrics-twice")
        elif find_spec(package) is None:
            message = f"`{writer.name}` needs the package `{package}`, which is not installed"
            folder = f'"packages/metrics[{package}]"'
            hint = f"install sley-metrics[{package}], in a clone of Sley's repository: `pip install -e {folder}`"
            yield Problem(("metrics", index, "use"), message, hint, f"{package}-missing")
        seen.add(package)

"""The plan tables of `metrics.tensorboard` and `metrics.wandb`, and their check. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Literal

from pydantic import PositiveInt

from sley_core.api.plan import Plan, Table
from sley_core.records import Problem


class TensorboardConfig(Table):
    """Curves for TensorBoard, in the folder `tensorboard` of the run's folder; needs `sley-metrics[tensorboard]`."""

    flush_s: PositiveInt = 10
    """The most seconds between a new point and its write to the file."""


class WandbConfig(Table):
    """Curves for Weights & Biases, with one W&B run for each run of Sley; needs `sley-metrics[wandb]`."""

    project: str
    """The W&B project."""

    entity: str | None = None
    """The user or team that owns the project. The default is the owner of the API key."""

    mode: Literal["online", "offline"] = "online"
    """Whether rows go to the server, or to the folder `wandb` in the run's folder for `wandb sync` (offline)."""

    tags: tuple[str, ...] = ()
    """The tags of the W&B run."""


def check_metrics(plan: Plan) -> Iterator[Problem]:
    """Yields a problem for each TensorBoard or W&B writer whose package is not installed or that the plan lists twice."""
    packages: set[str] = set()
    for index, writer in enumerate(plan.metrics):
        if not isinstance(writer.config, TensorboardConfig | WandbConfig):
            continue
        package = "tensorboard" if isinstance(writer.config, TensorboardConfig) else "wandb"
        if package in packages:
            yield Problem(("metrics", index), f"`{writer.name}` is listed twice", "remove one of them", "metrics-twice")
        elif find_spec(package) is None:
            message = f"`{writer.name}` needs the package `{package}`, which is not installed"
            folder = f'"packages/metrics[{package}]"'
            hint = f"install sley-metrics[{package}]; in a clone of Sley's repository, run `pip install -e {folder}`"
            yield Problem(("metrics", index, "use"), message, hint, f"{package}-missing")
        packages.add(package)

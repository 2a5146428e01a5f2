"""The plan tables and records of the plugin `metrics`. Imports neither TensorBoard nor wandb."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Literal

from sley_core.api.plan import Plan, Table
from sley_core.errors import install_hint
from sley_core.hookspecs import hookimpl
from sley_core.records import MetricsWriterRecord, Problem


class TensorboardConfig(Table):
    """Writes curves for TensorBoard to the folder `tensorboard` in the run's folder. Needs `sley-metrics[tensorboard]`."""


class WandbConfig(Table):
    """Sends curves to Weights & Biases (W&B). Needs `sley-metrics[wandb]`."""

    project: str
    """The W&B project."""

    entity: str | None = None
    """The user or team that owns the project. Default: the default entity of the API key."""

    mode: Literal["online", "offline"] = "online"
    """The destination of rows: "online" is the W&B server, and "offline" is the folder `wandb` in the run folder, which
    `wandb sync` uploads.
    """

    tags: tuple[str, ...] = ()
    """The tags of the W&B run."""


@hookimpl
def sley_records() -> list[MetricsWriterRecord]:
    writers = "sley_metrics.writers"
    return [
        MetricsWriterRecord(name="tensorboard", config=TensorboardConfig, build=f"{writers}:TensorboardWriter"),
        MetricsWriterRecord(name="wandb", config=WandbConfig, build=f"{writers}:WandbWriter"),
    ]


@hookimpl
def sley_check_plan(plan: Plan) -> Iterator[Problem]:
    """Yields a problem for each TensorBoard or W&B writer that the plan lists twice or whose package is not installed."""
    packages: set[str] = set()
    for index, writer in enumerate(plan.metrics):
        if not isinstance(writer.config, TensorboardConfig | WandbConfig):
            continue
        package = "tensorboard" if isinstance(writer.config, TensorboardConfig) else "wandb"
        if package in packages:
            yield Problem(("metrics", index), f"`{writer.name}` is listed twice", "remove one of them", "metrics-twice")
        elif find_spec(package) is None:
            message = f"`{writer.name}` needs the package `{package}`, which is not installed"
            hint = install_hint("metrics", package)
            yield Problem(("metrics", index, "use"), message, hint, f"{package}-missing")
        packages.add(package)

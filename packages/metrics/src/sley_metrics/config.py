"""The plan tables of the plugin `metrics`. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from sley_core.api.plan import Table


class TensorboardConfig(Table):
    """Writes curves for TensorBoard to the folder `tensorboard` in the run's folder. Needs `sley-metrics[tensorboard]`."""

    flush_s: PositiveInt = 10
    """The maximum time in seconds until a new point is written to the file."""


class WandbConfig(Table):
    """Sends curves to Weights & Biases, with one W&B run for each run of Sley. Needs `sley-metrics[wandb]`."""

    project: str
    """The W&B project."""

    entity: str | None = None
    """The user or team that owns the project. Default: the owner of the API key."""

    mode: Literal["online", "offline"] = "online"
    """The destination of rows: the server, or for `wandb sync` the folder `wandb` in the run's folder (offline)."""

    tags: tuple[str, ...] = ()
    """The tags of the W&B run."""

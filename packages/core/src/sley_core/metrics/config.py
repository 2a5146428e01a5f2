"""The tables of core's metrics writers. Imports no torch."""

from __future__ import annotations

from typing import Literal

from sley_core.table import Positive, Table


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

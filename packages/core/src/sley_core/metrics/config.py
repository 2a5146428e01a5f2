"""The tables of core's metrics writers. Imports no torch."""

from __future__ import annotations

from sley_core.table import Positive, Table


class JsonlConfig(Table):
    """One JSON object per optimizer step, in `metrics.jsonl` of the run's folder."""


class TensorboardConfig(Table):
    """Curves for TensorBoard, in the folder `tensorboard` of the run's folder; needs `sley-core[tensorboard]`."""

    flush_s: Positive = 10
    """Seconds after which a new point is in the file at the latest."""

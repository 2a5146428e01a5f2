"""The table `[checkpoint]` of `checkpoint.any_layout`."""

from __future__ import annotations

from typing import Literal

from sley_core.api.plan import CheckpointConfig, Positive, PositiveFloat


class AnyLayoutConfig(CheckpointConfig):
    """Checkpoints that any layout resumes from, written by all ranks; besides those of the table, the last step is saved."""

    every_steps: Positive | None = None
    """Optimizer steps from one checkpoint to the next."""

    every_minutes: PositiveFloat | None = None
    """Minutes from one checkpoint to the next; with `every_steps`, whichever comes first."""

    keep: Positive = 2
    """How many checkpoints to keep; older ones are deleted once a newer one is verified."""

    mode: Literal["async", "sync"] = "async"
    """Whether the next step continues while a checkpoint is written."""

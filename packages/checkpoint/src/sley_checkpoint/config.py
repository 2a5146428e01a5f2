"""The table `[checkpoint]` of `checkpoint.any_layout`."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from sley_core.api.plan import CheckpointConfig


class AnyLayoutConfig(CheckpointConfig):
    """Checkpoints that a run can resume from in any layout. All ranks write them. A run also saves its last step."""

    every_steps: PositiveInt | None = None
    """The number of optimizer steps between checkpoints."""

    every_minutes: PositiveFloat | None = None
    """The minutes between checkpoints. With `every_steps`, a save is due at whichever comes first."""

    keep: PositiveInt = 2
    """The number of checkpoints to keep. Older checkpoints are deleted once a newer one is verified."""

    mode: Literal["async", "sync"] = "async"
    """Whether training continues during the save (`async`) or waits (`sync`)."""

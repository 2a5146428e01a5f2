"""Declares the record and the table of the plugin `checkpoint`."""

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from sley_core.api.plan import CheckpointConfig
from sley_core.hookspecs import hookimpl
from sley_core.records import CheckpointerRecord


class AnyLayoutConfig(CheckpointConfig):
    """Checkpoints that a run can resume from in any layout. All ranks write them. A run also saves its last step."""

    every_steps: PositiveInt | None = None
    """The number of optimizer steps between checkpoints. By default, steps do not trigger a save."""

    every_minutes: PositiveFloat | None = None
    """The number of minutes between checkpoints. With `every_steps`, a save is due whenever either interval has passed. By
    default, time does not trigger a save.
    """

    keep: PositiveInt = 2
    """The number of checkpoints to keep. Older checkpoints are deleted once a newer one is verified."""

    mode: Literal["async", "sync"] = "async"
    """Whether training continues during a save (`async`) or waits until the save is complete (`sync`)."""


@hookimpl
def sley_records() -> list[CheckpointerRecord]:
    """Returns the `checkpoint.any_layout` record."""
    build, files = "sley_checkpoint.checkpoints:AnyLayoutCheckpointer", "sley_checkpoint.reader:CheckpointFileReader"
    return [CheckpointerRecord(name="any_layout", config=AnyLayoutConfig, build=build, files=files, keeps_best=True)]

"""What the plugin `pickles` has. Imports no torch."""

from __future__ import annotations

from pydantic import PositiveInt

from sley_core.api.plan import CheckpointConfig
from sley_core.hookspecs import hookimpl
from sley_core.records import CheckpointerRecord


class PicklesConfig(CheckpointConfig):
    """Pickles that a run of any layout resumes from."""

    every_steps: PositiveInt = 100
    """Optimizer steps from one checkpoint to the next."""


@hookimpl
def sley_records() -> list[CheckpointerRecord]:
    return [CheckpointerRecord(name="folder", config=PicklesConfig, build="sley_pickles.checkpointer:Pickles")]

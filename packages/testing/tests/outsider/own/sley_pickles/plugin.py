"""The plugin `pickles`. Imports no torch."""

from pydantic import PositiveInt

from sley_core.api.plan import CheckpointConfig
from sley_core.hookspecs import hookimpl
from sley_core.records import CheckpointerRecord


class PicklesConfig(CheckpointConfig):
    """Saves pickles, from which a run of any layout resumes."""

    every_steps: PositiveInt = 100
    """The number of optimizer steps between checkpoints."""


@hookimpl
def sley_records() -> list[CheckpointerRecord]:
    return [CheckpointerRecord(name="folder", config=PicklesConfig, build="sley_pickles.checkpointer:Pickles")]

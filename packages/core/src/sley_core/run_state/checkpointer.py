"""The checkpointer of a run: the plan's, or a stand-in that saves nothing and imports nothing."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sley_core.errors import PluginError
from sley_core.plan.kinds import CHECKPOINTER
from sley_core.protocols.records import Checkpointer
from sley_core.records import CheckpointerRecord

if TYPE_CHECKING:
    from pathlib import Path

    from sley_core.plan.loader import Loader
    from sley_core.plan.plan import Plan
    from sley_core.protocols import CheckpointFiles, Restored
    from sley_core.run_state.state import TrainingState

AUTO = "auto"


def checkpointer_of(state: TrainingState) -> Checkpointer:
    """Returns the checkpointer of the run with `state`."""
    component = state.plan.checkpoint
    checkpointer: Checkpointer = NoCheckpointer(state) if component is None else component.build(state)
    return checkpointer


class NoCheckpointer(Checkpointer):
    """Never saves by itself: for a run whose plan has no `[checkpoint]`. When a program asks for a save or a load, it imports
    the default checkpointer, which does it.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._default: Checkpointer | None = None

    def save(self, path: str | Path | None, step: int) -> str:
        """Saves as the default checkpointer. Raises PluginError "plugin-missing", which says what to install."""
        return self._imported().save(path, step)

    def load(self, path: str | Path, *, anew: bool) -> Restored | None:
        """Loads as the default checkpointer. Without it, "auto" finds nothing, and the run begins if it has saved nothing."""
        try:
            default = self._imported()
        except PluginError:
            known = self._state.attempt.known
            if str(path) != AUTO or (known is not None and (known.saved >= 0 or known.origin)):
                raise
            if not anew and self._state.attempt.folder is not None:
                self._state.attempt.refuse_to_begin_anew(f"`{self._state.folder}`")
            return None
        return default.load(path, anew=anew)

    def close(self) -> None:
        """Closes the default checkpointer, if it was imported."""
        if self._default is not None:
            self._default.close()

    def _imported(self) -> Checkpointer:
        if self._default is None:
            loader = self._state.plan.loader
            record = loader.record("checkpointers", CHECKPOINTER)
            build: Any = loader.load(CHECKPOINTER.partition(".")[0]).build_of(record)
            self._default = build(None, self._state)
        return self._default


def checkpoint_files(loader: Loader, plan: Plan | None = None) -> CheckpointFiles | None:
    """Returns the reader of the checkpoints of a run of `plan`; None if its checkpointer has none.

    Without a plan, or `[checkpoint]` in it, the default checkpointer's: raises PluginError "plugin-missing" without it.
    """
    if plan is not None and plan.checkpoint is not None:
        record = plan.checkpoint.record
    else:
        record = loader.record("checkpointers", CHECKPOINTER)
    assert isinstance(record, CheckpointerRecord), record
    if record.files is None:
        return None
    module, _, attribute = record.files.partition(":")
    files: CheckpointFiles = getattr(import_module(module), attribute)()
    return files

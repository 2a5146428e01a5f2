"""The interfaces through which a run records things: counters, metrics rows, state kept for later steps, and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from sley_core.attempt import Lineage
    from sley_core.run_state.pieces import Saved, SavedRun


@runtime_checkable
class Counts(Protocol):
    """Reports numbers. Any live object of a run may have it: a gradient handler, the weight communicator, the stage link, a
    scheduler hook, a policy, a pool.

    `Run.counts` asks each after the last step; `summary.json` keeps the numbers of rank 0, and `train-cli run -v` prints them.
    Objects that communicate report `sent_bytes_per_step`, as `api.comm.SentBytes` counts it.
    """

    def counts(self) -> Mapping[str, float]:
        """Returns numbers by name, with the unit in the name (`gathered_bytes_per_step`). May be called at any time;
        does not communicate.
        """
        ...


@runtime_checkable
class Keeps(Protocol):
    """Saves state in checkpoints. Any live object of a run has it that keeps something between steps on which the bits of later
    steps depend: a gradient handler, the weight communicator, the stage link, a scheduler hook, a policy.

    A checkpoint stores it for each rank, and restores it if the layout is the same.
    """

    def kept(self) -> Mapping[str, Tensor]:
        """Returns what this rank keeps, by name, as live tensors. Called between two steps; does not communicate."""
        ...

    def restore_kept(self, kept: Mapping[str, Tensor]) -> None:
        """Restores what `kept` returned, on the host; with an empty mapping, starts anew. Called on all ranks, between two
        steps.
        """
        ...


@runtime_checkable
class MetricsWriter(Protocol):
    """Receives one row per optimizer step, on rank 0."""

    def write(self, row: Mapping[str, float | int]) -> None: ...
    def close(self) -> None: ...


@runtime_checkable
class Rewinds(Protocol):
    """Marks a metrics writer whose output a resumed run can continue."""

    def rewind(self, step: int) -> None:
        """Drops the rows of all steps after `step`, which will be taken again."""


class Restored(NamedTuple):
    """Says what `Run.load_checkpoint` has loaded. path: of the checkpoint. step: how many optimizer steps were done. lineage:
    the attempts that took its steps (`SavedRun.lineage`). notes: for the user. passed_over: newer checkpoints that are damaged,
    each with its damages.
    """

    path: str
    step: int
    lineage: Lineage
    notes: list[str]
    passed_over: Sequence[tuple[str, Sequence[object]]] = ()


class Checkpointer(Protocol):
    """Saves and restores a run, on each of its ranks; named by the plan's table `[checkpoint]`. All ranks call each method
    alike, between two steps, but for `stage`, `counts` and `close`.

         probe ──> (is_due ──> save_due)* ──> train_done ──> close            save, load: whenever the program asks

    `save` and `load` are needed; the defaults of the others never save by themselves.
    """

    def save(self, path: str | Path | None, step: int) -> str:
        """Writes a checkpoint of the run after `step` steps; returns its path or URL once it is complete on all ranks.

        path: where; None for the next one in the run's folder of checkpoints (`TrainingState.folder`). Calls
        `TrainingState.attempt.begin(step)` before it saves, and `TrainingState.attempt.saved(step)` after it saved there.
        Raises RunError "checkpoint-failed" on all ranks alike if it cannot be written.
        """
        ...

    def load(self, path: str | Path, *, anew: bool) -> Restored | None:
        """Restores the run by `TrainingState.restore`, and returns what was loaded; None for "auto" if the run may begin.

        path: a checkpoint, or a folder of several, of which the newest whole one is loaded; "auto" for the newest that this run
        wrote. anew: whether "auto" may return None although the run has taken steps; otherwise that raises
        (`RunAttempt.refuse_to_begin_anew`). Raises on all ranks alike, with nothing changed: RunError "no-checkpoint",
        "checkpoint-damaged", and what `TrainingState.restore` raises.
        """
        ...

    def probe(self) -> None:
        """Called before the first step of `Run.train`. Raises RunError on all ranks alike if the saves to come would fail."""
        return

    def is_due(self, step: int) -> bool:
        """Returns whether to save after `step`, the same on all ranks."""
        return False

    def wants_save(self) -> bool:
        """Returns this rank's vote for a save after the step in progress. Where any rank votes, all are told by `ask`."""
        return False

    def ask(self) -> None:
        """Called once ranks have voted for a save: the next `is_due` says so."""
        return

    def save_due(self, step: int) -> None:
        """Starts the save that is due, and may end it later. A failure is a note of `TrainingState`: the run goes on."""
        self.save(None, step)

    def train_done(self, step: int, *, was_stopped: bool) -> None:
        """Called after the last step of `Run.train`: ends the save in progress, and saves the run. was_stopped: whether ranks
        have asked to stop before the plan's last step.
        """
        return

    def stage(self) -> None:
        """Called before weights, masters or optimizer states change or move: copies what a save in progress has not read yet.
        Does not communicate.
        """
        return

    def counts(self) -> Mapping[str, float]:
        """Returns numbers by name, as `Counts` does."""
        return {}

    def close(self) -> None:
        """Ends the save in progress, as far as the other ranks still answer. Does not communicate."""
        return


class CheckpointFiles(Protocol):
    """Reads checkpoints without a run, for the command line: which there are, and their weights. Paths may be URLs."""

    def names(self, folder: str) -> list[str]:
        """Returns the names of the complete checkpoints in a folder of several, the newest first."""
        ...

    def describe(self, path: str) -> SavedRun | None:
        """Returns the description of the checkpoint at `path`; None if there is none. Raises RunError "checkpoint-damaged"."""
        ...

    def is_whole(self, path: str) -> bool:
        """Returns whether the checkpoint at `path` is as it was written. Reads all of it."""
        ...

    def open(self, path: str) -> Saved | None:
        """Returns the checkpoint at `path`, or the newest whole one of several there; None for a folder that has none.

        Reads all of it once, and raises RunError "checkpoint-damaged" if it is not as it was written.
        """
        ...

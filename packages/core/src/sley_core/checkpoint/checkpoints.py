"""`run.save_checkpoint` and `run.load_checkpoint`: what all ranks do together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sley_core.checkpoint.folders import Folder, open_folder
from sley_core.checkpoint.index import BUFFERS, INDEX, WEIGHTS, read_index
from sley_core.checkpoint.reader import Checkpoint
from sley_core.checkpoint.restore import SHOWN, Restoring, mismatches
from sley_core.checkpoint.run_tensors import RunTensors, restore_generators
from sley_core.checkpoint.saving import Preparation, Where, absolute
from sley_core.checkpoint.values import from_json, to_json
from sley_core.checkpoint.verify import Damage, damages, ready
from sley_core.comm.collectives import gather_objects
from sley_core.engine.agreement import Agreement
from sley_core.errors import RunError, SleyError, UsageError
from sley_core.plan.changes import changes, refuse_changes
from sley_core.plan.factory import cause

if TYPE_CHECKING:
    from sley_core.data.feed import Feed
    from sley_core.plan.plan import Plan

AUTO = "auto"


class Restored(NamedTuple):
    """What was loaded. step: how many optimizer steps were done. passed_over: newer checkpoints that are damaged, each with
    what of it is. notes: for the user.
    """

    path: str
    step: int
    passed_over: list[tuple[str, list[Damage]]]
    notes: list[str]


class Checkpoints:
    """The checkpoints of a run, on one rank. folder: of those that have no path of their own; None where the run has none.

    resolved: returns the resolved plan as text; the run sets it.
    """

    def __init__(self, plan: Plan, tensors: RunTensors, feed: Feed | None, folder: str | None) -> None:
        self.plan = plan
        self.tensors = tensors
        self.feed = feed
        self.folder = None if folder is None else absolute(folder)
        self.resolved: Callable[[], str] = plan.to_toml
        self._preparation = Preparation(plan, tensors)
        self._control = tensors.parts.groups["control"]

    def save(self, path: str | Path | None, step: int) -> str:
        """Writes a checkpoint and returns its folder, when it is there on all ranks. All ranks call it."""
        where = Where(absolute(path), False) if path is not None else Where(self._folder(), True)
        Agreement(self.tensors.parts.groups).begin("saving a checkpoint").check()
        writing = self._preparation.prepare(where, step, self._state(step), self.resolved())
        failed = ""
        try:
            writing.run()
        except RunError as error:
            failed = error.diagnostics[0].message
        # All ranks: it is there when rank 0 has given it its name.
        everyone = gather_objects(failed, self._control, what="whether the checkpoint is written")
        if any(everyone):
            raise RunError("checkpoint-failed", next(filter(None, everyone)))
        return writing.target.text

    def load(self, path: str | Path) -> tuple[Restored | None, int]:
        """Loads the checkpoint at `path`, or the newest whole one of several there. All ranks call it.

        path: "auto" for the run's own folder. Returns what was loaded, and the steps done; None if that has none.
        """
        source = self._folder() if str(path) == AUTO else absolute(path)
        Agreement(self.tensors.parts.groups).begin("loading a checkpoint").check()
        chosen, passed_over = self._choose(open_folder(source))
        if chosen is None:
            if str(path) == AUTO:
                return None, 0
            raise RunError("no-checkpoint", f"there is no checkpoint in {source}")
        found = Checkpoint(chosen, read_index(chosen))
        different = changes(found.index.plan, self.resolved())
        refuse_changes(different)
        topology = self.tensors.parts.topology
        layout = {axis: topology.size_of(axis) for axis in ("pp", "dp", "sp", "wp")} | {"world": topology.world}
        restoring = Restoring(self.tensors, found, is_same_layout=found.index.layout == layout)
        restoring.notes += (f"the plan has changed since: {one}" for one in different)
        self._check(restoring)
        self._alike(restoring.restore, "load the checkpoint")
        self._restore_state(found, restoring.notes)
        return Restored(chosen.text, found.step, passed_over, restoring.notes), found.step

    def _folder(self) -> str:
        if self.folder is None:
            raise UsageError(
                "no-folder",
                "this run has no folder for checkpoints",
                hint="give a path, or a folder to `assemble(plan, world, folder=...)`",
            )
        return self.folder

    def _state(self, step: int) -> dict[str, Any]:
        update = self.tensors.update
        return {
            "steps": step,
            "was_taken": update.was_taken,
            "scale": None if update.scale is None else update.scale.state(),
            "data": None if self.feed is None else to_json(self.feed.state()),
        }

    def _restore_state(self, found: Checkpoint, notes: list[str]) -> None:
        update, state, world = self.tensors.update, found.index.state, self.tensors.parts.world
        self.tensors.parts.store.state.was_taken = bool(state["was_taken"])
        if update.scale is not None:
            if state["scale"] is None:
                notes.append("the checkpoint has no loss scale: it begins as the plan says")
            else:
                update.scale.restore(state["scale"])
        if self.feed is not None and state["data"] is not None:
            self.feed.restore(from_json(state["data"]))
        if found.index.layout["world"] == world.size:
            restore_generators(found.index.ranks[world.rank]["generators"], world.device)
        else:
            notes.append(
                f"it was written by {found.index.layout['world']} ranks: generators of Python, numpy and torch that a program "
                "draws from are not restored"
            )

    def _choose(self, folder: Folder) -> tuple[Folder | None, list[tuple[str, list[Damage]]]]:
        """Returns the checkpoint to load, the same on all ranks, and newer ones that are damaged. Ranks share the reading.

        Raises RunError `checkpoint-damaged` if the only one, or all of several, are.
        """
        world = self.tensors.parts.world
        said: list[Any] = []
        if world.rank == 0:
            names = folder.names()
            said = [INDEX in names, ready(folder)]
        # All ranks: which there are is what rank 0 sees.
        is_one, names = gather_objects(said, self._control, what="which checkpoints there are")[0]
        passed_over: list[tuple[str, list[Damage]]] = []
        for candidate in [folder] if is_one else [folder.child(name) for name in names]:
            mine = damages(candidate, world.rank, world.size)
            # All ranks: they look at the same candidates in one order.
            every = gather_objects(mine, self._control, what="what is damaged of a checkpoint")
            found = [Damage(*one) for one in dict.fromkeys(tuple(one) for theirs in every for one in theirs)]
            if not found:
                return candidate, passed_over
            passed_over.append((candidate.text, found))
        if passed_over:
            path, found = passed_over[0]
            message = f"the checkpoint {path} is damaged: {', '.join(map(str, found[:SHOWN]))}"
            raise RunError("checkpoint-damaged", message, hint="there is no older one that is whole")
        return None, []

    def _check(self, restoring: Restoring) -> None:
        """Raises RunError `checkpoint-mismatch`, on all ranks alike, if it is not one of this model and optimizer."""
        found, index = restoring.found, restoring.found.index
        expected = restoring.expected()
        said = [list(expected), list(mismatches(expected, found))]
        # All ranks: what nobody knows of is told only by all together.
        everyone = gather_objects(said, self._control, what="whether the checkpoint fits")
        wrong = list(dict.fromkeys(line for _, lines in everyone for line in lines))
        known = {name for names, _ in everyone for name in names}
        wrong += [
            f"{name!r} is not in the model"
            for name in found
            if name.startswith((WEIGHTS, BUFFERS)) and name not in known
        ]
        if index.optimizer != self.plan.optimizer.name:
            wrong.append(f"its optimizer is {index.optimizer}, the plan's is {self.plan.optimizer.name}")
        if wrong:
            more = f", and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
            raise RunError(
                "checkpoint-mismatch",
                f"{found.folder.text} is no checkpoint of this run: {', '.join(wrong[:SHOWN])}{more}",
                hint="`run.load_weights(read(path).weights(), strict=False)` takes what weights there are",
            )

    def _alike(self, what: Callable[[], None], words: str) -> None:
        """Calls `what`, and raises on all ranks if it raised on one."""
        failed = ""
        try:
            what()
        except SleyError as error:
            failed = error.diagnostics[0].message
        except Exception as error:
            failed = cause(error)
        # All ranks, whatever became of it on each.
        for rank, why in zip(self._control.ranks, gather_objects(failed, self._control, what=words), strict=True):
            if why:
                raise RunError("checkpoint-load", f"rank {rank} could not {words}: {why}")

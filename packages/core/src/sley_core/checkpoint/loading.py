"""Loads a checkpoint on all ranks together: whether it fits, and what each rank needs of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from sley_core.attempt import Lineage
from sley_core.checkpoint.choosing import SHOWN, PassedOver, Wanted, choose
from sley_core.checkpoint.index import BUFFERS, INDEX, WEIGHTS
from sley_core.checkpoint.restore import Restoring, mismatches
from sley_core.checkpoint.run_tensors import RunTensors, restore_generators
from sley_core.checkpoint.timed import TimedReads
from sley_core.comm.collectives import gather_objects
from sley_core.errors import PlanError, RunError, SleyError
from sley_core.factory import cause
from sley_core.json_values import from_json
from sley_core.plan.changes import changes, refuse_changes
from sley_core.plan.load import plan_from_text

if TYPE_CHECKING:
    from sley_core.checkpoint.reader import Checkpoint
    from sley_core.data.feed import Feed
    from sley_core.plan.plan import Plan


RATES = (("run", "steps"), ("optimizer", "lr"))
"""Keys besides `[learning_rate]` on which the learning rate of a step depends."""


class Restored(NamedTuple):
    """What was loaded. step: how many optimizer steps were done. passed_over: newer checkpoints that are damaged, each with
    what of it is. notes: for the user. lineage: the attempts that took its steps.
    """

    path: str
    step: int
    passed_over: list[PassedOver]
    notes: list[str]
    lineage: Lineage


class CheckpointLoader:
    """Loads checkpoints into one rank of a run."""

    def __init__(self, plan: Plan, tensors: RunTensors, feed: Feed | None) -> None:
        self.plan = plan
        self.tensors = tensors
        self.feed = feed
        self._control = tensors.parts.groups["control"]

    def load(self, wanted: Wanted, resolved: str) -> Restored | None:
        """Loads the checkpoint to which `wanted` leads, and returns what was loaded. All ranks call it.

        resolved: the run's own plan. Returns None if the newest of the run's own is wanted and there is none; a checkpoint of
        another run is refused then. Raises PlanError `resume-differs` for changes with which the run would compute other
        numbers.
        """
        # Half, so that a rank says what it cannot read before the others stop waiting for it.
        with TimedReads(self.plan.limits.collective_timeout_s / 2) as reads:
            return self._load(wanted, resolved, reads)

    def _load(self, wanted: Wanted, resolved: str, reads: TimedReads) -> Restored | None:
        """Chooses a checkpoint, checks that it fits the plan and the model, and restores the run from it; None if there is
        none.

        resolved: this run's plan as TOML. Raises RunError or PlanError on all ranks alike, before anything is changed.
        """
        found, passed_over, origin, notes = choose(wanted, self.tensors.parts, reads)
        if found is None:
            return None
        path, run = found.folder.text, found.index.run
        # The folder of a run says which checkpoints are its own; without one, their run's name does.
        if wanted.path is None and wanted.folder is None and path != origin and run != self.plan.run.name:
            message = f"{path} is of the run {run!r}, and this one is {self.plan.run.name!r}"
            raise RunError(
                "checkpoint-mismatch", message, hint="name the checkpoint itself to go on from another run's"
            )
        different = changes(found.index.plan, resolved)
        refuse_changes(different)
        topology = self.tensors.parts.topology
        layout = {axis: topology.size_of(axis) for axis in ("pp", "dp", "sp", "wp")} | {"world": topology.world}
        restoring = Restoring(self.tensors, found, is_same_layout=found.index.layout == layout)
        restoring.notes += notes
        restoring.notes += (f"the plan has changed since: {one}" for one in different)
        if any(change.path[0] == "learning_rate" or change.path in RATES for change in different):
            with suppress(
                SleyError
            ):  # a plan that cannot be loaded any more, as of weights that are gone, says nothing
                restoring.notes.append(self._rates(found))
        self._check(restoring)
        self._alike(restoring.restore, "load the checkpoint")
        self._restore_state(found, restoring.notes)
        return Restored(path, found.step, passed_over, restoring.notes, found.index.lineage)

    def _rates(self, found: Checkpoint) -> str:
        """Returns a note on what a changed plan makes of the learning rate."""
        before, step = plan_from_text(found.index.plan, f"{found.folder.text}/{INDEX}", Path()), found.step
        then, now, last = (
            plan.learning_rate.build(plan.run.steps)(at) * float(cast("Any", plan.optimizer.config).lr)
            for plan, at in ((before, max(0, step - 1)), (self.plan, step), (self.plan, self.plan.run.steps - 1))
        )
        rates = f"{then:.3g} in step {step}, {now:.3g} in step {step + 1}, {last:.3g} in step {self.plan.run.steps}"
        return f"with the changed plan the learning rate is {rates}"

    def _restore_state(self, found: Checkpoint, notes: list[str]) -> None:
        """Restores the rest of a run's state: loss scale, skips, position in the data, generators. Appends to `notes` what it
        cannot.
        """
        update, state, world = self.tensors.update, found.index.state, self.tensors.parts.world
        self.tensors.parts.store.state.was_taken = bool(state["was_taken"])
        if update.scale is not None:
            if state["scale"] is None:
                notes.append("the checkpoint has no loss scale: it begins as the plan says")
            else:
                update.scale.restore(state["scale"])
        if update.skips is not None and state["skips"] is not None:
            update.skips.restore(state["skips"])
        if self.feed is not None and state["data"] is not None:
            self.feed.restore(from_json(state["data"]))
        if found.index.layout["world"] == world.size:
            restore_generators(found.index.ranks[world.rank]["generators"], world.device)
        else:
            notes.append(
                f"it was written by {found.index.layout['world']} ranks: generators of Python, numpy and torch that a program "
                "draws from are not restored"
            )

    def _check(self, restoring: Restoring) -> None:
        """Raises RunError `checkpoint-mismatch`, on all ranks alike, if the checkpoint is of another model or optimizer."""
        found, index = restoring.found, restoring.found.index
        expected = restoring.expected()
        said = [list(expected), list(mismatches(expected, found)), self._changed_data(index.state["data"])]
        # All ranks: what nobody knows of is told only by all together.
        everyone = gather_objects(said, self._control, what="whether the checkpoint fits")
        wrong = list(dict.fromkeys(line for _, lines, _ in everyone for line in lines))
        known = {name for names, _, _ in everyone for name in names}
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

        if changed := next((text for _, _, text in everyone if text), ""):
            self._data_changed(changed, restoring.notes)

    def _changed_data(self, state: Any) -> str:
        """Returns in words how this rank's data differ from the checkpoint's, or why they cannot be read; "" if they do not."""
        if self.feed is None or state is None:
            return ""
        self.feed.close()
        try:
            return self.feed.changed_since(from_json(state))
        except Exception as error:  # the other ranks wait for an answer
            return f"the data cannot be read: {cause(error)}"

    def _data_changed(self, changed: str, notes: list[str]) -> None:
        """Raises PlanError "data-changed", or appends a note about samples of a program's own, which may be drawn as they are
        read.
        """
        assert self.feed is not None, changed
        if not self.feed.is_digest_exact:
            notes.append(changed)
            return
        hint = "put them back, or begin a run of another name; `run.load_weights` takes weights alone"
        raise PlanError("data-changed", changed, path=("data",), hint=hint)

    def _alike(self, what: Callable[[], None], words: str) -> None:
        """Calls `what`, and raises on all ranks if it raised on one. words: describe it in the error."""
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

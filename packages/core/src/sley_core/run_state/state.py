"""The state of a run for a checkpointer: this rank's part to save, and the means to restore it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from sley_core.engine.agreement import Agreement
from sley_core.errors import KeyPath, PlanError, PluginError, RunError, SleyError, cause
from sley_core.json_text import decode_value, encode_value
from sley_core.optim.learning_rate import learning_rate_factor
from sley_core.plan.kinds import CHECKPOINTER
from sley_core.plan.load import plan_from_text, replace_values
from sley_core.plan.write import check_changes, compare_plans
from sley_core.protocols import Checkpointer, CheckpointFiles, RestoreResult
from sley_core.records import CheckpointerRecord
from sley_core.run_state.best import Best
from sley_core.run_state.pieces import BUFFERS, WEIGHTS, CheckpointReader, SavedRun, TensorPiece
from sley_core.run_state.tensors import BASE, Restoring, RunTensors, generators, restore_generators

if TYPE_CHECKING:
    from sley_core.attempt import RunAttempt
    from sley_core.data.feed import Feed
    from sley_core.plan.loader import Loader
    from sley_core.plan.plan import Plan

T = TypeVar("T")

RATES = (("run", "steps"), ("optimizer", "lr"))
"""Keys besides `[learning_rate]` on which the learning rate of a step depends."""

_SHOWN = 4


@dataclass(eq=False)
class TrainingState:
    """The state that one rank of a run keeps from step to step. All methods are called between two steps.

    attempt: of the run. folder: of checkpoints without a path of their own, None if the run has none. plan_values:
    values that only the run could determine, by their path in the plan. notes: for the user, about saves and loads. best: the
    best evaluation so far, None without `keep_best`.
    """

    plan: Plan
    _tensors: RunTensors
    _feed: Feed | None
    attempt: RunAttempt
    folder: str | None
    _plan_values: Mapping[KeyPath, Any]
    notes: list[str]

    def __post_init__(self) -> None:
        self.parts = self._tensors.parts
        self._control = self.parts.groups["control"]
        evaluation = self.plan.evaluation
        table = None if evaluation is None else evaluation.best
        self.best = None if evaluation is None or table is None else Best(table, evaluation.patience)

    @property
    def resolved_plan(self) -> Plan:
        """The plan completed by values that only the run could determine: ranks of the world, samples of an epoch, ..."""
        values: dict[KeyPath, Any] = {**self._plan_values, ("parallel", "dp"): self.parts.topology.dp}
        if self._feed is not None and self._feed.num_samples is not None:
            values["data", "samples_per_epoch"] = self._feed.num_samples
        return replace_values(self.plan, values)

    def agree(self, what: str) -> None:
        """Checks that all ranks are about to do `what`; a collective of all ranks. Raises RunError "ranks-differ"."""
        Agreement(self.parts.groups).begin(what).check()

    def all_or_none(self, work: Callable[[], T], what: str, code: str = "checkpoint-load") -> T:
        """Returns `work()`, done by each rank alone; raises RunError `code` on all alike if any fails. what: describes it."""
        failed, result = "", None
        try:
            result = work()
        except Exception as error:
            failed = cause(error)
        # All ranks, whatever became of it on each.
        for rank, why in zip(self._control.ranks, self._control.gather_objects(failed, what=what), strict=True):
            if why:
                raise RunError(code, f"rank {rank} could not {what}: {why}")
        return cast("T", result)

    def pieces(self) -> list[TensorPiece]:
        """Returns this rank's tensors, which are live memory, by names that no layout changes. Ranks that have the same part of
        a tensor have the same bits of it. Communicates nothing.

        Weights, masters and optimizer states change in the next update, before which `Checkpointer.stage` is called; the others
        at any time. Raises RunError "checkpoint-type" for a dtype that files cannot hold.
        """
        return self._tensors.pieces()

    def rank_values(self) -> dict[str, Any]:
        """Returns, as JSON, the state of this rank that is no tensor, for `SavedRun.with_ranks`."""
        rank = {"generators": generators(self.parts.world.device)}
        values = self._tensors.values() | {BASE + name: value for name, value in self._tensors.base.items()}
        return {"values": values, "paths": self._tensors.paths(), "rank": rank}

    def describe(self, step: int) -> SavedRun:
        """Returns the description of the run after `step` steps: the same on all ranks, but only rank 0 has the lineage."""
        update, attempt = self._tensors.update, self.attempt.current
        plugins = {name: str(plugin) for name, plugin in self.plan.plugins.items()}
        return SavedRun(
            run=self.plan.run.name,
            step=step,
            lineage=() if attempt is None else attempt.lineage,
            plan=self.resolved_plan.to_toml(),
            versions={"torch": torch.__version__, **plugins},
            layout=self._layout,
            optimizer=self.plan.optimizer.name,
            state={
                "steps": step,
                "was_taken": self.parts.store.state.was_taken,
                "has_modes": update.traits.has_modes,
                "scale": None if update.scale is None else update.scale.state(),
                "skips": None if update.skips is None else update.skips.state(),
                "data": None if self._feed is None else encode_value(self._feed.state()),
                "best": None if self.best is None else self.best.state(),
            },
        )

    @property
    def _layout(self) -> dict[str, int]:
        topology = self.parts.topology
        return {axis: topology.size_of(axis) for axis in ("pp", "dp", "sp", "wp")} | {"world": topology.world}

    def restore(self, saved: CheckpointReader) -> list[str]:
        """Restores the run from a checkpoint of any layout; returns notes for the user. All ranks call it.

        Raises on all ranks alike, with nothing changed: PlanError "resume-differs" and "data-changed" for changes with which
        the run would compute other numbers, RunError "checkpoint-mismatch" for another model's or optimizer's; and RunError
        "checkpoint-load" if a rank cannot read it.
        """
        different = compare_plans(saved.description.plan, self.resolved_plan.to_toml())
        check_changes(different)
        restoring = Restoring(self._tensors, saved, is_same_layout=saved.description.layout == self._layout)
        restoring.notes += (f"the plan has changed since: {one}" for one in different)
        if any(change.path[0] == "learning_rate" or change.path in RATES for change in different):
            # A plan that can no longer be loaded, as of weights that are gone, says nothing.
            with suppress(SleyError):
                before, step = plan_from_text(saved.description.plan, saved.place, Path()), saved.description.step
                then, now, last = (
                    learning_rate_factor(plan)(at) * float(cast("Any", plan.optimizer.config).lr)
                    for plan, at in ((before, max(0, step - 1)), (self.plan, step), (self.plan, self.plan.run.steps - 1))
                )
                rates = f"{then:.3g} in step {step}, {now:.3g} in step {step + 1}, {last:.3g} in step {self.plan.run.steps}"
                restoring.notes.append(f"with the changed plan the learning rate is {rates}")
        self._check(restoring)
        self.all_or_none(restoring.restore, "load the checkpoint")
        self._restore_rest(saved.description, restoring.notes)
        return restoring.notes

    def _restore_rest(self, about: SavedRun, notes: list[str]) -> None:
        """Restores loss scale, skips, best evaluation, position in the data and generators. Appends a note on each that it
        cannot restore.
        """
        update, state, world = self._tensors.update, about.state, self.parts.world
        self.parts.store.state.was_taken = bool(state["was_taken"])
        if update.scale is not None:
            if state["scale"] is None:
                notes.append("the checkpoint has no loss scale: it begins as the plan says")
            else:
                update.scale.restore(state["scale"])
        if update.skips is not None and state["skips"] is not None:
            update.skips.restore(state["skips"])
        if self.best is not None and (best := state.get("best")) is not None:
            notes.extend(note for note in [self.best.restore(best)] if note)
        if self._feed is not None and state["data"] is not None:
            self._feed.restore(decode_value(state["data"]))
        if about.layout["world"] == world.size:
            restore_generators(about.ranks[world.rank]["generators"], world.device)
        else:
            notes.append(
                f"it was written by {about.layout['world']} ranks: generators of Python, numpy and torch that a program "
                "draws from are not restored"
            )

    def _check(self, restoring: Restoring) -> None:
        """Raises RunError "checkpoint-mismatch", on all ranks alike, if the checkpoint is of another model or optimizer;
        PlanError "data-changed" if the data differ for sure, a note if they may.
        """
        saved, about = restoring.saved, restoring.saved.description
        report = [
            list(restoring.expected()),
            list(restoring.mismatches()),
            self._changed_data(about.state["data"]),
            list(restoring.base_mismatches()),
        ]
        # All ranks: only together do they know all names of the model.
        everyone = self._control.gather_objects(report, what="whether the checkpoint fits")
        wrong = list(dict.fromkeys(line for _, lines, _, _ in everyone for line in lines))
        known = {name for names, _, _, _ in everyone for name in names}
        wrong += [
            f"{name!r} is not in the model" for name in saved.names if name.startswith((WEIGHTS, BUFFERS)) and name not in known
        ]
        if about.optimizer != self.plan.optimizer.name:
            wrong.append(f"its optimizer is {about.optimizer}, the plan's is {self.plan.optimizer.name}")
        if wrong:
            more = f", and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            message = f"{saved.place} is no checkpoint of this run: {', '.join(wrong[:_SHOWN])}{more}"
            hint = "`run.load_weights(..., strict=False)` takes those of its weights that the model has"
            raise RunError("checkpoint-mismatch", message, hint=hint)
        if changed_base := next((names[0] for _, _, _, names in everyone if names), ""):
            message = f"{saved.place} was trained on another base: {changed_base!r} has other values"
            hint = "put the files and the seed of the base back: a checkpoint of adapters does not have its weights"
            raise RunError("adapters-base", message, hint=hint)
        if changed := next((text for _, _, text, _ in everyone if text), ""):
            assert self._feed is not None, changed
            if self._feed.is_digest_exact:
                hint = "put them back, or begin a run of another name; `run.load_weights` takes weights alone"
                raise PlanError("data-changed", changed, path=("data",), hint=hint)
            restoring.notes.append(changed)  # samples may be drawn as they are read

    def _changed_data(self, state: Any) -> str:
        """Returns in words how this rank's data differ from the checkpoint's, or why they cannot be read; "" if they do not."""
        if self._feed is None or state is None:
            return ""
        self._feed.close()
        try:
            return self._feed.changed_since(decode_value(state))
        except Exception as error:  # the other ranks wait for an answer
            return f"the data cannot be read: {cause(error)}"


AUTO = "auto"


def checkpointer_of(state: TrainingState) -> Checkpointer:
    """Returns the checkpointer of the run with `state`."""
    component = state.plan.checkpoint
    checkpointer: Checkpointer = NoCheckpointer(state) if component is None else component.build(state)
    return checkpointer


class NoCheckpointer(Checkpointer):
    """Saves when a program asks for it, by the default checkpointer: for a run whose plan has no `[checkpoint]`."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._default: Checkpointer | None = None

    def save(self, path: str | Path | None, step: int) -> str:
        """Saves as the default checkpointer. Raises PluginError "plugin-missing" with the package to install."""
        return self._imported().save(path, step)

    def load(self, path: str | Path, *, allow_fresh_start: bool) -> RestoreResult | None:
        """Loads as the default checkpointer. Without it, "auto" finds nothing, and the run begins if it has saved nothing."""
        try:
            default = self._imported()
        except PluginError:
            known = self._state.attempt.known
            if str(path) != AUTO or (known is not None and (known.saved >= 0 or known.origin)):
                raise
            if not allow_fresh_start and self._state.attempt.folder is not None:
                self._state.attempt.refuse_fresh_start(f"`{self._state.folder}`")
            return None
        return default.load(path, allow_fresh_start=allow_fresh_start)

    def close(self) -> None:
        if self._default is not None:
            self._default.close()

    def _imported(self) -> Checkpointer:
        if self._default is None:
            loader = self._state.plan.loader
            record = loader.record("checkpointers", CHECKPOINTER)
            build: Any = loader.load(CHECKPOINTER.partition(".")[0]).load_builder(record)
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
    files: CheckpointFiles = record.load(record.files)()
    return files

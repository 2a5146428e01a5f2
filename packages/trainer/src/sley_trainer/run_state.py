"""Collects this rank's part of a run's state for a checkpointer, and restores it. A checkpoint has these names:

weights/<parameter>              the master weight if there is one, else the weight
averages/<parameter>             the average of the weight over steps, if the plan has [averaging]
optimizer/<parameter>/<state>    the state under the optimizer's key
buffers/<name>                   a persistent buffer, or a buffer that may differ between ranks
ranks/<rank>/<name>              a tensor of one rank
ranks/<rank>/extra/<name>        the extra state of a module
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from sley_core import checkpointing
from sley_core.checkpointing import BASE, OPTIONS, SHARED, base_error
from sley_core.data.feed import Feed
from sley_core.engine.agreement import RankAgreement
from sley_core.engine.parts import Parts
from sley_core.engine.weights import OptimizerParam
from sley_core.errors import KeyPath, PlanError, PluginError, RunError, format_cause, format_path, shorten_names
from sley_core.files import CHECKPOINTS_FOLDER
from sley_core.json_text import decode_value
from sley_core.optim import optimizers
from sley_core.plan.kinds import CHECKPOINTER
from sley_core.plan.load import replace_values
from sley_core.plan.plan import Component, Plan, check_changes, compare_plans
from sley_core.protocols import Checkpointer, RestoreResult, Stateful
from sley_core.records import CheckpointerRecord
from sley_core.run_folder import AttemptTracker
from sley_core.weight_files.write import DTYPES
from sley_trainer import restore
from sley_trainer.evaluation import BestEvaluation
from sley_trainer.restore import RunRestorer
from sley_trainer.run_memory import RunMemory
from sley_trainer.state_dict import encode_extra_state, modules_with_extra_state
from sley_trainer.update import Update, list_averages

T = TypeVar("T")


class RunState(checkpointing.TrainingState):
    """Gives a checkpointer the state of a run on this rank, and restores it; implements `TrainingState`. components: the plan's
    components with their objects in the run. plan_values: the plan values that the run has determined, by their path in the
    plan. notes: messages for the user. best: the best evaluation; None if the plan has no `keep_best`.
    """

    def __init__(
        self,
        plan: Plan,
        parts: Parts,
        update: Update,
        feed: Feed | None,
        memory: RunMemory,
        per_rank_buffers: Sequence[str],
        components: Iterable[tuple[Component, object]],
        run_folder: Path | None,
        plan_values: Mapping[KeyPath, Any],
        notes: list[str],
    ) -> None:
        self.plan, self.parts, self.update, self.notes = plan, parts, update, notes
        self._feed, self._memory, self._plan_values = feed, memory, plan_values
        self._per_rank_buffers = per_rank_buffers
        self.stateful_objects = {
            f"{format_path(component.path)} {component.name}": part  # such as `gradient_handlers.0 dp.powersgd`
            for component, part in components
            if isinstance(part, Stateful)
        }
        self.attempt = AttemptTracker(run_folder, parts.world.rank)
        self.folder = plan.checkpoint.config.folder if plan.checkpoint else None
        if self.folder is None and run_folder is not None:
            self.folder = str(run_folder.absolute() / CHECKPOINTS_FOLDER)
        self._control = parts.groups["control"]
        evaluation = plan.evaluation
        table = None if evaluation is None else evaluation.best
        self.best = None if evaluation is None or table is None else BestEvaluation(table, evaluation.patience)

    @cached_property
    def resolved_plan(self) -> Plan:
        """The plan with the values that the run has determined, such as `dp` and the number of samples per epoch, from
        its first use, since the files that it names may change during the run.
        """
        values: dict[KeyPath, Any] = {**self._plan_values, ("parallel", "dp"): self.parts.topology.dp}
        if self._feed is not None and self._feed.num_samples is not None:
            values["data", "samples_per_epoch"] = self._feed.num_samples
        return replace_values(self.plan, values)

    def agree(self, label: str) -> None:
        RankAgreement(self.parts.groups).begin(label).check()

    def all_or_none(self, work: Callable[[], T], label: str, code: str = "checkpoint-load") -> T:
        failure, result = "", None
        try:
            result = work()
        except Exception as error:
            failure = format_cause(error)
        for rank, reason in zip(self._control.ranks, self._control.gather_objects(failure, label=label), strict=True):
            if reason:
                raise RunError(code, f"rank {rank} could not {label}: {reason}")
        return cast("T", result)

    def pieces(self) -> list[checkpointing.TensorPiece]:
        self._memory.update_masters("a checkpoint")
        current_memory, pieces = self._memory.memory_lookup(), list[checkpointing.TensorPiece]()
        for name, region, tensor in self._local_tensors():
            if tensor.dtype not in DTYPES or tensor.layout is not torch.strided:
                tensor_type = f"{tensor.dtype}, {tensor.layout}"
                raise RunError("checkpoint-type", f"a checkpoint cannot store {name!r}, which is {tensor_type}")
            views = region.split(current_memory(tensor.detach()))
            pieces += (checkpointing.TensorPiece(name, region.shape, rectangle, view) for rectangle, view in views)
        return pieces

    def _local_tensors(self) -> Iterator[tuple[str, checkpointing.Region, Tensor]]:
        """Yields, for each tensor, its name in the checkpoint, its region in the full tensor, and this rank's part."""
        masters = {entry.param: entry for entry in self.update.masters.local_params}
        for param in self.parts.registry:
            if param.name in self.base_checksums:
                continue  # a resumed run reads it again or draws it again
            if param in masters:
                yield (
                    checkpointing.WEIGHTS + param.name,
                    checkpointing.Region.from_param(param, masters[param].elements),
                    masters[param].parameter,
                )
            elif self.parts.store.elements(param) is None or 0 in param.shape:  # not split, or empty
                yield checkpointing.WEIGHTS + param.name, checkpointing.Region.from_param(param), param.parameter
        for entry, average in list_averages(self.update.averages, self.update.masters.local_params):
            region = checkpointing.Region.from_param(entry.param, entry.elements)
            yield checkpointing.AVERAGES + entry.name, region, average
        for entry, state in self._optimizer_states():
            for name, value in restore.state_leaves(state):
                if isinstance(value, Tensor):
                    shape = tuple(value.shape)
                    is_elementwise = shape == tuple(entry.parameter.shape)
                    region = restore.state_region(entry) if is_elementwise else checkpointing.Region(shape)
                    yield restore.state_name(entry.name, name), region, value
        for name, buffer, is_per_rank in self.buffers():
            saved_name = checkpointing.BUFFERS + name
            for saved in (saved_name, self.rank_name(saved_name)) if is_per_rank else (saved_name,):
                yield saved, checkpointing.Region(tuple(buffer.shape)), buffer
        states = {path: stateful_object.saved_state() for path, stateful_object in self.stateful_objects.items()}
        states["extra"] = {
            name: encode_extra_state(name, module) for name, module in modules_with_extra_state(self.parts.layers)
        }
        for path, tensors in states.items():
            for name, tensor in tensors.items():
                yield self.rank_name(f"{path}/{name}"), checkpointing.Region(tuple(tensor.shape)), tensor

    @property
    def base_checksums(self) -> Mapping[str, int]:
        """The checksums of the frozen parameters under an adapter, by name. A checkpoint stores these, not the parameters."""
        return self.parts.registry.base_checksums

    def _optimizer_states(self) -> list[tuple[OptimizerParam, Any]]:
        """Returns the parameters that this rank updates, each with its optimizer state, which is {} before the first update."""
        params = self.update.masters.optimizer_params
        return [(entry, self.update.optimizer.state.get(entry.parameter, {})) for entry in params]

    def buffers(self) -> Iterator[tuple[str, Tensor, bool]]:
        """Yields the name and tensor of each buffer to save, and whether the buffer may differ between ranks."""
        for layer in self.parts.layers:
            for prefix, module in layer.module.named_modules(prefix=layer.name):
                for attribute, buffer in module.named_buffers(recurse=False):
                    name = f"{prefix}.{attribute}"
                    is_per_rank = any(fnmatchcase(name, pattern) for pattern in self._per_rank_buffers)
                    if is_per_rank or attribute not in module._non_persistent_buffers_set:
                        yield name, buffer, is_per_rank

    def rank_name(self, name: str) -> str:
        """Returns the checkpoint's name for the tensor `name` of this rank."""
        return f"ranks/{self.parts.world.rank}/{name}"

    def rank_values(self) -> dict[str, Any]:
        rank = {"generators": restore.generator_states(self.parts.world.device)}
        values = self._optimizer_values() | {BASE + name: value for name, value in self.base_checksums.items()}
        trees = {
            entry.name: restore.encode_state(tree, entry.name, "state")
            for entry, state in self._optimizer_states()
            if not restore.is_flat(tree := restore.name_leaves(state))
        }
        return {"values": values, "trees": trees, "rank": rank}

    def _optimizer_values(self) -> dict[str, Any]:
        """Returns the optimizer's states (without tensors), options and shared values, encoded for JSON, by checkpoint name."""
        values = {}
        for entry, state in self._optimizer_states():
            for name, value in restore.state_leaves(state):
                if not isinstance(value, Tensor):
                    values[restore.state_name(entry.name, name)] = restore.encode_state(value, entry.name, name)
        names = {id(entry.parameter): entry.name for entry in self.update.masters.optimizer_params}
        for group in self.update.optimizer.param_groups:
            options = optimizers.options_to_save(self.update.optimizer, group)
            if changed := {key: restore.encode_state(value, "a group", key) for key, value in options.items()}:
                values |= {OPTIONS + names[id(param)]: changed for param in group["params"] if id(param) in names}
        for path, value in optimizers.shared_values_to_save(self.update.optimizer, self.update.initial_values).items():
            key = ".".join(map(str, path[1:]))
            values[f"{SHARED}{path[0]}/{key}"] = restore.encode_state([list(path), value], "all parameters", key)
        return values

    def describe(self, step: int) -> checkpointing.SavedRun:
        update, attempt = self.update, self.attempt.current
        plugins = {name: str(plugin) for name, plugin in self.plan.plugins.items()}
        return checkpointing.SavedRun(
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
                "averaging": None if update.averages is None else update.averages.first_update,
                "scale": None if update.scale is None else update.scale.state(),
                "skips": None if update.skips is None else update.skips.state(),
                "data": None if self._feed is None else self._feed.encoded_state(),
                "best": None if self.best is None else self.best.state(),
            },
        )

    @property
    def _layout(self) -> dict[str, int]:  # the size of each axis and of the world
        topology = self.parts.topology
        return {axis: topology.size_of(axis) for axis in ("pp", "dp", "sp", "wp")} | {"world": topology.world_size}

    def restore(self, saved: checkpointing.CheckpointReader) -> list[str]:
        """Returns notes for the user on what changed or is lost. `TrainingState.restore` lists the errors."""
        changes = compare_plans(saved.description.plan, self.resolved_plan.to_toml())
        check_changes(changes)
        restorer = RunRestorer(self, saved, is_same_layout=saved.description.layout == self._layout)
        restorer.notes += (f"the plan has changed since the checkpoint: {change}" for change in changes)
        self._check_checkpoint(restorer)
        self.update.include_unfrozen_params()
        self.all_or_none(restorer.restore, "load the checkpoint")
        self._restore_values(saved.description, restorer.notes)
        return restorer.notes

    def _restore_values(self, description: checkpointing.SavedRun, notes: list[str]) -> None:
        """Restores the position in the data, the loss scale and other values of `description`. Adds notes on lost values."""
        update, state, world = self.update, description.state, self.parts.world
        self.parts.store.state.was_taken = bool(state["was_taken"])
        if update.scale is not None:
            if state["scale"] is None:
                notes.append("the checkpoint has no loss scale, so the plan's initial scale is used")
            else:
                update.scale.restore(state["scale"])
        if update.skips is not None and state["skips"] is not None:
            update.skips.restore(state["skips"])
        if self.best is not None and (best := state.get("best")) is not None:
            notes.extend(note for note in [self.best.restore(best)] if note)
        if self._feed is not None and state["data"] is not None:
            self._feed.restore(decode_value(state["data"]))
        if description.layout["world"] == world.size:
            restore.restore_generators(description.ranks[world.rank]["generators"], world.device)
        else:
            note = f"{description.layout['world']} ranks wrote the checkpoint, so the states of the generators of Python, "
            notes.append(note + "numpy and torch are not restored")

    def _check_checkpoint(self, restorer: RunRestorer) -> None:
        """Raises RunError "checkpoint-mismatch" on all ranks if the model or the optimizer does not match the checkpoint.
        Raises PlanError "data-changed" if the data certainly differ, and adds a note if the data may differ.
        """
        saved, description = restorer.saved, restorer.saved.description
        data_change = self._describe_data_change(description.state["data"])
        report = [list(restorer.expected_shapes()), list(restorer.mismatches()), data_change, list(restorer.base_mismatches())]
        reports = self._control.gather_objects(report, label="whether the checkpoint fits")
        problems = list(dict.fromkeys(line for _, lines, _, _ in reports for line in lines))
        model_names = {name for names, _, _, _ in reports for name in names}
        problems += [
            f"{name!r} is not in the model"
            for name in saved.names
            if name.startswith((checkpointing.WEIGHTS, checkpointing.BUFFERS)) and name not in model_names
        ]
        if problems:
            message = f"{saved.place} does not fit this run: {shorten_names(problems)}"
            hint = "use `run.load_weights(..., strict=False)` to load only the weights that the model has"
            raise RunError("checkpoint-mismatch", message, hint=hint)
        if changed_base := next((names[0] for _, _, _, names in reports if names), ""):
            raise base_error(saved.place, changed_base)
        if data_change := next((text for _, _, text, _ in reports if text), ""):
            assert self._feed is not None, data_change
            if self._feed.has_exact_digest:
                hint = "restore the data, or start a run with another name; `run.load_weights` loads only weights"
                raise PlanError("data-changed", data_change, path=("data",), hint=hint)
            restorer.notes.append(data_change)  # only a note, since the dataset may be random

    def _describe_data_change(self, state: Any) -> str:
        """Returns how this rank's data differ from the data of the checkpoint, or why reading fails; "" if nothing differs."""
        if self._feed is None or state is None:
            return ""
        try:
            self._feed.close()
            return self._feed.describe_change(decode_value(state))
        except Exception as error:  # any error is reported, since the other ranks wait for the result
            return f"the data cannot be read: {format_cause(error)}"


AUTO = "auto"  # the `path` that makes `load` look for the newest checkpoint of the run


def build_checkpointer(state: RunState) -> Checkpointer:
    """Returns the checkpointer of the plan's `[checkpoint]` table, or a `LazyCheckpointer` if the plan has no such table."""
    component = state.plan.checkpoint
    checkpointer: Checkpointer = LazyCheckpointer(state) if component is None else component.build(state)
    return checkpointer


class LazyCheckpointer(Checkpointer):
    """The checkpointer of a plan without `[checkpoint]`: loads the default checkpointer when a program first saves or loads."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._default: Checkpointer | None = None

    def save(self, path: str | Path | None, step: int) -> str:
        """Saves with the default checkpointer. Raises PluginError "plugin-missing" if it is not installed."""
        return self._load_default().save(path, step)

    def load(self, path: str | Path, *, allow_fresh_start: bool) -> RestoreResult | None:
        """Loads with the default checkpointer. If it is not installed and the run has no checkpoint, "auto" returns None."""
        try:
            default = self._load_default()
        except PluginError:
            attempt = self._state.attempt.latest
            if str(path) != AUTO or (attempt is not None and (attempt.saved_step >= 0 or attempt.loaded_path)):
                raise
            if not allow_fresh_start and self._state.attempt.folder is not None:
                self._state.attempt.refuse_fresh_start(f"`{self._state.folder}`")
            return None
        return default.load(path, allow_fresh_start=allow_fresh_start)

    def close(self) -> None:
        if self._default is not None:
            self._default.close()

    def _load_default(self) -> Checkpointer:  # raises PluginError "plugin-missing"
        if self._default is None:
            loader = self._state.plan.loader
            record = loader.record(CheckpointerRecord, CHECKPOINTER)
            build: Any = loader.load(CHECKPOINTER.partition(".")[0]).load_builder(record)
            self._default = build(None, self._state)
        return self._default

"""Runs one optimizer step of a stage, from this rank's samples to updated weights.

layers of the model ──partition──> positions ──placement──> chunks of each stage

begin ──> forward and backward actions ──> handlers finish ──> norm, clip, optimizer ──> weights_updated
               gradients become ready ^
               and handlers reduce them
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import torch

from sley_core.actions.action import (
    Action,
    Kind,
    LoweredList,
    Placement,
    evaluation_lists,
    loop,
    select_actions,
    select_forwards,
    sequential_actions,
)
from sley_core.actions.lower import lower
from sley_core.comm.exchanges import BETWEEN_STEPS, EVALUATION, REDUCTION_END, UPDATE
from sley_core.comm.world import World
from sley_core.data.dataset import DataInfo
from sley_core.engine import agreement
from sley_core.engine.agreement import RankAgreement, collect_exchanges, exchange_difference, exchange_mismatch_error
from sley_core.engine.parts import Parts, StepState
from sley_core.engine.registry import Param, Stages, tie_axis, tied_stages
from sley_core.engine.step_batch import BatchWeight, StepBatch
from sley_core.engine.totals import StepTotals, Votes
from sley_core.errors import PlanError, RunError, run_closed_error
from sley_core.model.attention import use_attention_kernel
from sley_core.model.layers import Layer, Model
from sley_core.plan.check import has_tie_handler
from sley_core.plan.plan import Plan
from sley_core.protocols import GradientHandler
from sley_core.records import PartitionerRecord, ScheduleRecord
from sley_core.topology import DEFAULT_CHANNEL, GroupEntry, Topology
from sley_trainer.evaluation import Metrics, Tally
from sley_trainer.execute import Executor, ListRun
from sley_trainer.update import Update

ActionGenerator = Callable[[int], Sequence[Sequence[Action]]]
"""A function that takes the number of microbatches and returns the compute actions of every stage, in order."""


class ActionLists:
    """Generates, lowers and caches the action lists of one stage. Lowering adds transfers between stages. Each stage lowers the
    lists of all stages, so that every rank detects a wrong schedule. generate: returns the compute actions of all stages, which
    are not cached. lower_all_stages: takes the number of microbatches, and returns the lowered training lists of all stages.
    """

    def __init__(self, generate: ActionGenerator, placement: Placement, stage: int) -> None:
        self.generate = generate
        self.placement = placement
        self.stage = stage
        self.lower_all_stages = lru_cache(maxsize=64)(lambda micros: lower(generate(micros), placement, micros))
        self._lower_evaluations = lru_cache(maxsize=64)(
            lambda micros: lower(self._forwards(micros), placement, micros, training=False)
        )

    def for_stage(self, stage: int) -> "ActionLists":
        """Returns the action lists of `stage`; the result shares the cache of this object."""
        lists = copy(self)
        lists.stage = stage
        return lists

    def splits_backward(self, num_microbatches: int) -> bool:
        """Returns whether this stage's training list splits each backward into input gradients (I) and weight gradients (W)."""
        return any(action.kind is Kind.WEIGHT_GRADIENT for action in select_actions(self.training_list(num_microbatches)))

    def training_list(self, num_microbatches: int) -> LoweredList:
        """Returns this stage's lowered list for a training step."""
        return self.lower_all_stages(num_microbatches)[self.stage]

    def evaluation_list(self, num_microbatches: int) -> LoweredList:
        """Returns this stage's lowered list for an evaluation, without backwards."""
        return self._lower_evaluations(num_microbatches)[self.stage]

    def _forwards(self, num_microbatches: int) -> Sequence[Sequence[Action]]:
        """Returns the forwards of all stages in the order of the schedule, or of `evaluation_lists` if the schedule does not
        support the number of microbatches: an evaluation or a prediction may have fewer than the plan.
        """
        try:
            return list(map(select_forwards, self.generate(num_microbatches)))
        except PlanError:
            return evaluation_lists(self.placement, num_microbatches)


@dataclass(frozen=True)
class Stage:
    """One stage's part of the model. layers_by_position: (stage, layers) for each part of the model, in the model's order."""

    action_lists: ActionLists
    layers_by_position: Stages

    def for_stage(self, stage: int) -> "Stage":
        """Returns the part of the model on `stage`; the result shares the cached action lists of this object."""
        return Stage(self.action_lists.for_stage(stage), self.layers_by_position)

    @cached_property
    def chunks(self) -> list[Sequence[Layer]]:
        """The layers of each model chunk of this stage."""
        placement, stage = self.action_lists.placement, self.action_lists.stage
        return [self.layers_by_position[placement.position(stage, chunk)][1] for chunk in range(placement.chunks)]

    @property
    def layers(self) -> list[Layer]:
        """This stage's layers, chunk by chunk."""
        return [layer for chunk in self.chunks for layer in chunk]

    @property
    def tied_stages(self) -> list[tuple[int, ...]]:
        """The tuples of stages that share at least one tied parameter, without duplicates."""
        return tied_stages(self.layers_by_position)


def build_stage(plan: Plan, topology: Topology, rank: int, model: Model, costs: Sequence[float]) -> Stage:
    """Returns the part of `model` (on meta) that `rank` holds. costs: the cost of each layer, for the partition. Raises the
    PlanError of the partitioner, and PlanError "handler-missing" if stages share a parameter and no handler sums its gradients.
    """
    stage_index = topology.coordinates(rank).stage
    if plan.pipeline is None:  # forward and backward of one microbatch after the other
        lists = ActionLists(lambda micros: [sequential_actions(micros)], loop(1), 0)
        return Stage(lists, [(0, model.layers)])
    assert plan.partition is not None, "a pipeline has a partition"
    schedule = plan.pipeline.build()
    placement = schedule.placement(topology.pp)
    lists = ActionLists(lambda micros: schedule.lists(topology.pp, micros), placement, stage_index)
    with plan.document.locate_errors():
        boundaries = plan.partition.build()(costs, placement.num_positions)
    positions = [model.layers[first:last] for first, last in pairwise(boundaries)]
    layers_by_position = [(placement.holder(position).stage, layers) for position, layers in enumerate(positions)]
    stage = Stage(lists, layers_by_position)
    if stage.tied_stages and not has_tie_handler(plan):
        message = f"stages {list(stage.tied_stages[0])} share a parameter, but no gradient handler sums its gradients"
        tie_handler = plan.pipeline.record.ties if isinstance(plan.pipeline.record, ScheduleRecord) else None
        handler_text = f'`use = "{tie_handler}"`' if tie_handler else '`use = "pp.shared_modules"` from sley-pp'
        hint = f"add [[gradient_handlers]] with {handler_text} after the reducer"
        raise PlanError.from_diagnostics([plan.diagnostic("handler-missing", message, ("gradient_handlers",), hint)])
    return stage


def list_tie_groups(stage: Stage, topology: Topology) -> list[GroupEntry]:
    """Returns the groups that sum gradients of tied parameters: the ranks with the same offset in each tuple of tied stages."""
    size = topology.ranks_per_stage
    return [
        GroupEntry(tie_axis(stages), DEFAULT_CHANNEL, tuple(number * size + offset for number in stages))
        for stages in stage.tied_stages
        for offset in range(size)
    ]


def count_layer_parameters(model: Model) -> list[float]:
    """Returns the number of parameter elements in each layer; a tied parameter counts in each of its layers."""
    return [float(sum(p.numel() for p in layer.module.parameters())) for layer in model.layers]


def needs_timed_costs(plan: Plan) -> bool:
    """Returns whether the plan's partitioner needs the measured time of each layer and the plan does not have these times."""
    if plan.partition is None or not isinstance(plan.partition.record, PartitionerRecord):
        return False
    return plan.partition.record.timer is not None and plan.partition.config.layer_costs is None


def time_layers(plan: Plan, world: World, build_model: Callable[[DataInfo], Model], dtype: torch.dtype) -> list[float]:
    """Returns each layer's time in seconds, as the partitioner's timer measures it. All ranks must call it."""
    record = plan.partition.record if plan.partition else None
    assert isinstance(record, PartitionerRecord), record
    seconds: list[float] = record.load(record.timer)(plan, world, build_model, dtype)
    return seconds


NO_VOTES = Votes()  # votes neither to stop nor to save
NO_METRICS = Metrics()  # declares no metrics besides the loss


@dataclass(eq=False)
class Stepper:
    """Runs optimizer steps, evaluations and predictions of this rank. `handlers` are called in the plan's order, so that their
    collectives have the same order on all ranks.

    executor: runs the action `lists`. undo: detaches all parts from the model at the end. compare: compares the replicas of
    weights and buffers, before the first step and then every `COMPARE_EVERY` steps; None skips this. attention_name: the plan's
    `[model] attention`. is_unfinished: whether the handlers of a started step are not done, so that their exchanges may be in
    flight.
    """

    parts: Parts
    executor: Executor
    lists: ActionLists
    handlers: Sequence[GradientHandler]
    update: Update
    undo: ExitStack
    compare: Callable[[], None] | None
    attention_name: str
    is_unfinished: bool = field(default=False, init=False)
    is_closed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        parts = self.parts
        self.store, self.groups, self.device, self.events = parts.store, parts.groups, parts.world.device, parts.events
        self.state: StepState = self.store.state
        self.agreement = RankAgreement(self.groups, self.store)
        self._num_agreed = 0
        if self.handlers:
            self.store.on_ready.append(self._gradient_ready)
            self.store.on_chunk_done.append(self._chunk_done)

    def step(
        self, step: int, batch: StepBatch, *, votes: Votes = NO_VOTES, outputs: dict[int, Any] | None = None
    ) -> StepTotals:
        """Trains on `batch` (forward, backward, reduction, update), and returns the totals of the step. All ranks must call it.
        On CUDA it returns before the device is done, and `read` of the result waits. A call after a failed step starts afresh.

        step: the number of the step, from 0. votes: this rank's votes. outputs: receives a copy of the model's output of each
        microbatch, on ranks with the last layer.
        """
        if self.is_closed:
            raise run_closed_error("stepper")
        with self.device.as_default(), use_attention_kernel(self.attention_name):
            loss = self._run(step, batch, outputs)
            self.state.step_progress.begin_entry(REDUCTION_END)
            for handler in self.handlers:
                handler.finish_step(self.state)
            self.is_unfinished = False
            self.state.step_progress.begin_entry(UPDATE)
            for event in self.events.gradients_done:
                event()
            if (skips := self.update.skips) is not None:
                skips.settle()
            # All ranks know the global weight, so only one of them adds it.
            totals = self.update.step(step, loss, self.agreement.weight if self.groups["all"].coord == 0 else 0.0, votes)
            totals.fetch()
            self.state.was_taken = self.update.was_taken
            if skips is not None:
                skips.record(totals)
                if self.device.is_async and self.update.was_taken:  # the host does not know yet
                    self.state.was_taken = lambda: not totals.read().is_skippable
            for event in self.events.after_update:
                event()
            for handler in self.handlers:
                handler.weights_updated(self.state)
            self.state.step_progress.begin_entry(BETWEEN_STEPS)
            return totals

    def _run(self, step: int, batch: StepBatch, outputs: dict[int, Any] | None) -> torch.Tensor:
        """Runs all forwards and backwards of the step. Returns this rank's loss: a sum, or one value per microbatch."""
        num_microbatches = batch.num_microbatches
        entries = self.lists.training_list(num_microbatches)
        self.state.begin(step, select_actions(entries), num_microbatches, self.groups["dp"].coord * num_microbatches)
        self.is_unfinished = True
        self.store.begin_step()
        for event in self.events.began:
            event()
        for group in self.groups.values():
            group.exchange_log.clear()
        self.agreement.begin(f"step {step + 1}", batch, self.store.refusal)
        compare = self.compare if self._num_agreed % agreement.COMPARE_EVERY == 0 else None
        # No rank waits for another one in its first action.
        can_defer_check = all(self.groups[axis].size == 1 for axis in ("model", "sp"))
        if can_defer_check and compare is None:
            self.state.after_first_action = self.agreement.check
        else:
            self.agreement.check()
        self._num_agreed += 1
        if compare is not None:
            compare()
        for handler in self.handlers:
            handler.begin_step(self.state)
        if self.executor.sources is not None:
            self.executor.sources.begin(batch)
        weight = None  # only ranks with the loss know the divisor of gradients
        if self.executor.has_loss:
            weight = BatchWeight(self._global_weight, self.update.scale.value if self.update.scale else 1.0)
        return self.executor.run(entries, self.state, ListRun(batch.micros, self.store, weight, outputs))

    def _global_weight(self) -> float:
        """Returns the loss weight of the whole batch, after waiting until the ranks have agreed on the step."""
        self.agreement.check()
        return self.agreement.weight

    def evaluate(self, batches: Iterable[StepBatch], metrics: Metrics = NO_METRICS) -> dict[str, float]:
        """Returns the mean loss over all `batches` as "loss", and the means of `metrics` by name; NaN for a count of 0. All
        ranks must call it with the same number of batches. Raises RunError "not-finite", "nothing-counts" or "metric-result".
        """
        with self._evaluation_mode() as state:
            weight, losses, tally = 0.0, [], Tally(metrics)
            for group in self.groups.values():
                group.exchange_log.clear()
            for index, batch in enumerate(batches):
                entries = self._begin_forward("an evaluation", index, batch, state)
                counts = tally if metrics.builtin_names or metrics.custom_metric is not None else None
                run = ListRun(batch.micros, tally=counts, num_counted=batch.num_counted)
                losses.append(self.executor.run(entries, state, run))
                weight += self.agreement.weight  # the sum over all ranks
            names = tally.agree_names(self.groups["control"])
            sums = [losses, *(tally.sums_by_batch(name, index) for name in names for index in (0, 1))]
            difference = torch.tensor([exchange_difference(self.groups.values())], dtype=torch.float64)
            totals = torch.cat([self.device.move(difference), *map(self.store.reduction.loss_terms, sums)])
            # All ranks evaluate after the same steps and on the same number of batches; stages without the loss add nothing.
            self.groups["all"].all_reduce(totals, label="the mean loss").wait()
            totals = totals.cpu()
            ranks_differ = bool(totals[0])
            loss, *values = (self.store.reduction.loss_from_terms(part, len(losses)) for part in totals[1:].chunk(len(sums)))
            state.step_progress.begin_entry(BETWEEN_STEPS)
        if ranks_differ:
            raise exchange_mismatch_error("an evaluation", collect_exchanges(self.groups.values()), self.groups["control"])
        if not weight:
            message = "the loss weight of the evaluated samples is 0, so their mean loss is undefined"
            raise RunError("nothing-counts", message, hint="check the data: all labels are ignored")
        mean = loss / weight
        if not math.isfinite(mean):
            hint = "check whether training diverged, or whether the data contains NaN or infinite values"
            raise RunError("not-finite", f"the loss of the evaluated samples is {mean}", hint=hint)
        pairs = zip(values[::2], values[1::2], strict=True)
        means = (total / count if count else math.nan for total, count in pairs)
        return {"loss": mean, **dict(zip(names, means, strict=True))}

    def predict(self, batch: StepBatch) -> dict[int, Any]:
        """Returns the model's outputs, keyed by microbatch; {} on ranks without the last layer. All ranks must call it."""
        with self._evaluation_mode() as state:
            entries = self._begin_forward("a prediction", 0, batch, state)
            outputs: dict[int, Any] = {}
            self.executor.run(entries, state, ListRun(batch.micros, outputs=outputs))
            state.step_progress.begin_entry(BETWEEN_STEPS)
        return outputs

    @contextmanager
    def _evaluation_mode(self) -> Iterator[StepState]:
        """Yields the state of an evaluation. Within the block all modules are in evaluation mode, without autograd."""
        modules = [layer.module for layers in self.executor.chunks for layer in layers]
        all_modules = [submodule for module in modules for submodule in module.modules()]
        training = [module.training for module in all_modules]
        for module in modules:
            module.eval()
        try:
            with (
                self.device.as_default(),
                use_attention_kernel(self.attention_name),
                self.device.preserve_random_state(),
                torch.no_grad(),
            ):
                step_progress = self.groups.progress.step_progress
                state = StepState(within=step_progress)
                step_progress.begin_entry(EVALUATION)
                yield state
        finally:
            # Restore the mode of each module: a program may keep some modules in evaluation mode.
            for module, was_training in zip(all_modules, training, strict=True):
                module.training = was_training

    def _begin_forward(self, label: str, index: int, batch: StepBatch, state: StepState) -> LoweredList:
        # All ranks check that they evaluate equal models, and that stages and slices have the same samples.
        self.agreement.begin(label, batch).check()
        entries = self.lists.evaluation_list(batch.num_microbatches)
        first_micro = self.groups["dp"].coord * batch.num_microbatches
        state.begin(index, select_actions(entries), batch.num_microbatches, first_micro)
        return entries

    def close(self) -> None:
        """Detaches all parts from the model, even if one of them cannot be detached. A later `step` raises StateError."""
        self.is_closed = True
        self.undo.close()

    def _gradient_ready(self, param: Param) -> None:
        for handler in self.handlers:
            handler.gradient_ready(param, self.state)

    def _chunk_done(self, chunk: int) -> None:
        for handler in self.handlers:
            handler.chunk_done(chunk, self.state)

"""Applies the plan's partition and schedule: this rank's layers, its chunks, and its lowered lists of actions.

layers of the model ──partition──> positions ──placement──> chunks of each stage
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import torch

from sley_core.actions.action import Action, Kind, Lowered, Placement, forward_only, loop, sequential
from sley_core.actions.lower import lower
from sley_core.comm.world import World
from sley_core.data.dataset import DataInfo
from sley_core.engine.registry import Stages, tie_axis, ties
from sley_core.errors import PlanError
from sley_core.model.layers import Layer, Model
from sley_core.plan.check import has_tie_handler
from sley_core.plan.plan import Plan
from sley_core.records import PartitionerRecord, ScheduleRecord
from sley_core.topology import DEFAULT_CHANNEL, GroupEntry, Topology

ActionGenerator = Callable[[int], Sequence[Sequence[Action]]]
"""A function that takes the number of microbatches and returns every stage's compute actions."""


class ActionLists:
    """Generates, lowers and caches the action lists of `stage`. Each stage lowers the lists of all stages, so that every rank
    detects a wrong schedule.

    generate: returns the compute actions of all stages, which are not cached. lower_all_stages: returns the lowered training
    lists of all stages. evaluation: returns this stage's lowered list without backwards.
    """

    def __init__(self, generate: ActionGenerator, placement: Placement, stage: int) -> None:
        self.generate = generate
        self.placement = placement
        self.stage = stage
        self.lower_all_stages = lru_cache(maxsize=64)(lambda micros: lower(generate(micros), placement, micros))
        self.evaluation = lru_cache(maxsize=64)(self._evaluation)

    def for_stage(self, stage: int) -> "ActionLists":
        """Returns the lists of stage `stage`, which share the training lists in this object's cache."""
        lists = ActionLists(self.generate, self.placement, stage)
        lists.lower_all_stages = self.lower_all_stages
        return lists

    def splits_backward(self, micros: int) -> bool:
        """Returns whether this stage's training list splits backwards into input gradients (I) and weight gradients (W)."""
        return any(isinstance(s, Action) and s.kind is Kind.WEIGHT_GRADIENT for s in self.training(micros))

    def training(self, micros: int) -> Lowered:
        """Returns this stage's lowered list for a training step of `micros` microbatches."""
        return self.lower_all_stages(micros)[self.stage]

    def _evaluation(self, micros: int) -> Lowered:
        lists = [forward_only(actions) for actions in self.generate(micros)]
        return lower(lists, self.placement, micros, training=False)[self.stage]


@dataclass(frozen=True)
class Stage:
    """One stage's part of the model.

    action_lists: the lists of this stage and their placement. layers_by_position: for each position in model order, the number
    of its stage and its layers.
    """

    action_lists: ActionLists
    layers_by_position: Stages

    def for_stage(self, number: int) -> "Stage":
        """Returns the part of the model on stage `number`, which shares this stage's cache of lists."""
        return Stage(self.action_lists.for_stage(number), self.layers_by_position)

    @cached_property
    def chunks(self) -> list[Sequence[Layer]]:
        """The layers of each of this stage's model chunks."""
        placement, stage = self.action_lists.placement, self.action_lists.stage
        return [self.layers_by_position[placement.position(stage, chunk)][1] for chunk in range(placement.chunks)]

    @property
    def layers(self) -> list[Layer]:
        """This stage's layers, chunk by chunk."""
        return [layer for chunk in self.chunks for layer in chunk]

    @property
    def ties(self) -> list[tuple[int, ...]]:
        """The stages that hold each tied parameter, without duplicate tuples."""
        return ties(self.layers_by_position)


def build_stage(plan: Plan, topology: Topology, rank: int, model: Model, costs: Sequence[float]) -> Stage:
    """Returns the part of `model` (on meta) that `rank` holds. costs: the cost of each layer, for the partition. Raises
    PlanError for errors of the partitioner, and "handler-missing" if stages share a parameter whose gradients no handler sums.
    """
    stage_index = topology.coordinates(rank).stage
    if plan.pipeline is None:  # forward and backward of one microbatch after the other
        lists = ActionLists(lambda micros: [sequential(micros)], loop(1), 0)
        return Stage(lists, [(0, model.layers)])
    assert plan.partition is not None, "a pipeline has a partition"
    schedule = plan.pipeline.build()
    placement = schedule.placement(topology.pp)
    lists = ActionLists(lambda micros: schedule.lists(topology.pp, micros), placement, stage_index)
    try:
        boundaries = plan.partition.build()(costs, placement.num_positions)
    except PlanError as error:
        raise plan.add_places(error) from None
    positions = [model.layers[first:last] for first, last in pairwise(boundaries)]
    layers_by_position = [(placement.holder(position).stage, layers) for position, layers in enumerate(positions)]
    stage = Stage(lists, layers_by_position)
    if stage.ties and not has_tie_handler(plan):
        message = f"stages {list(stage.ties[0])} share a parameter, and no gradient handler sums its gradients"
        link_ties = plan.pipeline.record.ties if isinstance(plan.pipeline.record, ScheduleRecord) else None
        handler_text = f'`use = "{link_ties}"`' if link_ties else '`use = "pp.shared_modules"`, of sley-pp,'
        hint = f"add [[gradient_handlers]] with {handler_text} behind the reducer"
        raise PlanError.from_diagnostics([plan.diagnostic("handler-missing", message, ("gradient_handlers",), hint)])
    return stage


def tie_groups(stage: Stage, topology: Topology) -> list[GroupEntry]:
    """Returns the groups that sum ties: for each tie and rank offset, the ranks at that offset in the stages of the tie."""
    size = topology.ranks_per_stage
    return [
        GroupEntry(tie_axis(stages), DEFAULT_CHANNEL, tuple(number * size + offset for number in stages))
        for stages in stage.ties
        for offset in range(size)
    ]


def count_layer_parameters(model: Model) -> list[float]:
    """Returns the number of parameters of each layer; a tied parameter counts in each of its layers."""
    return [float(sum(p.numel() for p in layer.module.parameters())) for layer in model.layers]


def needs_timed_costs(plan: Plan) -> bool:
    """Returns whether the plan's partition needs the seconds of each layer and the plan does not have them yet."""
    if plan.partition is None or not isinstance(plan.partition.record, PartitionerRecord):
        return False
    return plan.partition.record.timer is not None and plan.partition.config.layer_costs is None


def time_layers(plan: Plan, world: World, draft: Callable[[DataInfo], Model], dtype: torch.dtype) -> list[float]:
    """Times each layer with the partitioner's timer; returns the seconds, which are equal on every rank. All ranks must call it
    together. draft: a function that builds the model on meta.
    """
    record = plan.partition.record if plan.partition else None
    assert isinstance(record, PartitionerRecord), record
    seconds: list[float] = record.load(record.timer)(plan, world, draft, dtype)
    return seconds

"""Gives plugins the parts of a run that they are attached to: parameters, gradients, and where a step stands."""

from sley_core.engine.accumulators import add_at
from sley_core.engine.buffers import ALIGNMENT as SHARD_ALIGNMENT
from sley_core.engine.buffers import BufferShard, FlatBuffer, GradientBuffer, Layout, Planner, offsets, views_of
from sley_core.engine.direct import Handover, WeightQueue
from sley_core.engine.gradients import GradientStore
from sley_core.engine.parts import Parts
from sley_core.engine.reduction import Sums
from sley_core.engine.registry import Param
from sley_core.engine.step_state import MicroStep, Phase, StepState
from sley_core.engine.weights import WeightBuffer
from sley_core.sizes import ALIGNMENT_BYTES, round_up, split_by_size

__all__ = [
    "ALIGNMENT_BYTES",
    "SHARD_ALIGNMENT",
    "BufferShard",
    "FlatBuffer",
    "GradientBuffer",
    "GradientStore",
    "Handover",
    "Layout",
    "MicroStep",
    "Param",
    "Parts",
    "Phase",
    "Planner",
    "StepState",
    "Sums",
    "WeightBuffer",
    "WeightQueue",
    "add_at",
    "offsets",
    "round_up",
    "split_by_size",
    "views_of",
]

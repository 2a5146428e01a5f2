"""For plugins: a run's parameters, gradients, step state and values at stage boundaries; and datasets."""

from sley_core.data.batches import open_dataset
from sley_core.data.feed import SeededReader, read_sample, set_epoch
from sley_core.engine.boundary import Description, Leaf
from sley_core.engine.buffers import BufferShard, FlatBuffer, FlatLayout, GradientBuffer, Layout
from sley_core.engine.direct import WeightGradientSink
from sley_core.engine.parts import MicroStep, Parts, Phase, StepState
from sley_core.engine.reduction import Sums, add_at
from sley_core.engine.registry import Param
from sley_core.memory import ALIGNMENT_BYTES, round_up
from sley_core.weight_files.write import split_by_size

__all__ = ["ALIGNMENT_BYTES", "BufferShard", "Description", "FlatBuffer", "FlatLayout", "GradientBuffer", "Layout", "Leaf"]
__all__ += ["MicroStep", "Param", "Parts", "Phase", "SeededReader", "StepState", "Sums", "WeightGradientSink", "add_at"]
__all__ += ["open_dataset", "read_sample", "round_up", "set_epoch", "split_by_size"]

"""The parts of a run for plugins: parameters, gradients, step state and boundary values; datasets."""

from sley_core.data.factory import open_dataset as open_dataset
from sley_core.data.feed import SeededReader as SeededReader
from sley_core.data.feed import read_sample as read_sample
from sley_core.data.feed import set_epoch as set_epoch
from sley_core.engine.boundary import Description as Description
from sley_core.engine.boundary import Leaf as Leaf
from sley_core.engine.buffers import BufferShard as BufferShard
from sley_core.engine.buffers import FlatBuffer as FlatBuffer
from sley_core.engine.buffers import FlatLayout as FlatLayout
from sley_core.engine.buffers import GradientBuffer as GradientBuffer
from sley_core.engine.buffers import Layout as Layout
from sley_core.engine.direct import WeightGradientSink as WeightGradientSink
from sley_core.engine.parts import MicroStep as MicroStep
from sley_core.engine.parts import Parts as Parts
from sley_core.engine.parts import Phase as Phase
from sley_core.engine.parts import StepState as StepState
from sley_core.engine.reduction import Sums as Sums
from sley_core.engine.reduction import add_at as add_at
from sley_core.engine.registry import Param as Param
from sley_core.sizes import ALIGNMENT_BYTES as ALIGNMENT_BYTES
from sley_core.sizes import round_up as round_up
from sley_core.sizes import split_by_size as split_by_size

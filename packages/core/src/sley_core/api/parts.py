"""Gives plugins the parts of a run: parameters, gradients, the state of a step, and values between stages."""

from sley_core.engine.accumulators import add_at as add_at
from sley_core.engine.boundary import Description as Description
from sley_core.engine.boundary import Leaf as Leaf
from sley_core.engine.buffers import SHARD_ALIGNMENT as SHARD_ALIGNMENT
from sley_core.engine.buffers import BufferShard as BufferShard
from sley_core.engine.buffers import FlatBuffer as FlatBuffer
from sley_core.engine.buffers import GradientBuffer as GradientBuffer
from sley_core.engine.buffers import Layout as Layout
from sley_core.engine.buffers import offsets as offsets
from sley_core.engine.buffers import views_of as views_of
from sley_core.engine.direct import Handover as Handover
from sley_core.engine.direct import WeightQueue as WeightQueue
from sley_core.engine.gradients import GradientStore as GradientStore
from sley_core.engine.parts import Parts as Parts
from sley_core.engine.reduction import Sums as Sums
from sley_core.engine.registry import Param as Param
from sley_core.engine.step_state import MicroStep as MicroStep
from sley_core.engine.step_state import Phase as Phase
from sley_core.engine.step_state import StepState as StepState
from sley_core.engine.weights import WeightBuffer as WeightBuffer
from sley_core.sizes import ALIGNMENT_BYTES as ALIGNMENT_BYTES
from sley_core.sizes import round_up as round_up
from sley_core.sizes import split_by_size as split_by_size

"""The tables of the plugin `pp`; no torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sley_core.api.plan import Array, NonNegative, NonNegativeFloat, PlanPath, Positive, RecordReference, Table


class GPipeConfig(Table):
    """Runs all forwards, then all backwards; holds every micro-batch of the step."""


class OneFOneBConfig(Table):
    """Alternates one forward and one backward: as fast as GPipe, holding at most as many micro-batches as there are stages."""


class InterleavedConfig(Table):
    """Runs 1F1B over several model chunks per stage: the bubble is divided by their number, transfers are multiplied by it."""

    chunks: Annotated[int, Field(ge=2)] = 2
    """Model chunks per stage, assigned in a loop."""


class ZeroBubbleH1Config(Table):
    """Runs 1F1B with weight gradients deferred to where a stage would idle: a third of the bubble, in the same memory."""


class ZeroBubbleVConfig(Table):
    """Runs two model chunks per stage, placed as a V, with weight gradients where a stage would idle: almost no bubble."""


class CsvConfig(Table):
    """Runs a schedule from a file, in the format that torch.distributed.pipelining writes."""

    file: PlanPath
    """A row per stage, a cell per action: `0F0`, `0B0`, `0I0`, `0W0`."""


class LinkConfig(Table):
    """Sends point-to-point messages between stages; each receive is posted before its message is sent."""

    pool: Annotated[str, RecordReference("memory_pools")] | None = None
    """The pool of buffers for messages; left out, the run's own."""


class UniformConfig(Table):
    """Cuts the model into parts whose numbers of layers differ by at most one."""


class BalancedConfig(Table):
    """Cuts the model so that the heaviest part is as light as possible."""

    layer_costs: Array[NonNegativeFloat] | None = None
    """Cost of each layer, in any unit; left out, its number of parameters."""


class MeasuredConfig(Table):
    """Cuts the model so that the slowest part is as fast as possible, by a forward and backward of each layer that a run times
    first.
    """

    layer_costs: Array[NonNegativeFloat] | None = None
    """Seconds of each layer; left out, the run times the layers and writes the result into the plan in its folder."""


class ExplicitConfig(Table):
    """Cuts the model as written here."""

    layers: Annotated[Array[Positive], Field(min_length=1)]
    """Number of layers of each part, in the model's order."""


class SharedModulesConfig(Table):
    """Sums the gradients of parameters that several stages hold, so that their copies stay equal."""

    drift_check_steps: NonNegative = 0
    """Number of steps between comparisons of all copies bit for bit; 0 never compares them."""

"""The tables of the plugin `pp`; no torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sley_core.api.plan import Array, NonNegative, NonNegativeFloat, PlanPath, Positive, RecordReference, Table


class GPipeConfig(Table):
    """All forwards, then all backwards; holds every micro-batch of the step."""


class OneFOneBConfig(Table):
    """One forward, one backward: no longer than GPipe, and at most as many micro-batches held as there are stages."""


class InterleavedConfig(Table):
    """1F1B over several parts of the model per stage: the bubble is divided by their number, transfers are multiplied."""

    chunks: Annotated[int, Field(ge=2)] = 2
    """Parts of the model per stage, dealt in a loop."""


class ZeroBubbleH1Config(Table):
    """1F1B with weight gradients computed where a stage would wait: a third of the bubble, in the same memory."""


class ZeroBubbleVConfig(Table):
    """Two parts of the model per stage, placed as a V, and weight gradients where a stage would wait: almost no bubble."""


class CsvConfig(Table):
    """A schedule from a file, in the form that torch.distributed.pipelining writes."""

    file: PlanPath
    """A row per stage, a cell per action: `0F0`, `0B0`, `0I0`, `0W0`."""


class LinkConfig(Table):
    """Messages between stages, from point to point; each is posted before it is sent."""

    pool: Annotated[str, RecordReference("memory_pools")] = "pp.messages"
    """Where buffers for messages come from."""


class MessagesConfig(Table):
    """Keeps free messages, up to as much again as was ever in use at one time."""


class UniformConfig(Table):
    """As many layers in each part of the model as in any other, or one more."""


class BalancedConfig(Table):
    """Parts of which the heaviest is as light as can be."""

    layer_costs: Array[NonNegativeFloat] | None = None
    """What each layer costs, in any unit; left out, its number of parameters."""


class MeasuredConfig(Table):
    """Parts of which the slowest is as fast as can be, by a forward and backward of each layer that a run times first."""

    layer_costs: Array[NonNegativeFloat] | None = None
    """Seconds of each layer; left out, the run times the layers, and the plan in its folder has what it found."""


class ExplicitConfig(Table):
    """Parts as written here."""

    layers: Annotated[Array[Positive], Field(min_length=1)]
    """How many layers each part of the model has, in the model's order."""


class SharedModulesConfig(Table):
    """Sums the gradients of parameters that several stages hold, so that they stay one parameter."""

    drift_check_steps: NonNegative = 0
    """Every so many steps all copies are compared bit for bit; 0 never does."""

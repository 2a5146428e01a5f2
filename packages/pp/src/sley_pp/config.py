"""The plan tables of the plugin `pp`. Imports no torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from sley_core.api.plan import Array, PlanPath, Table


class GPipeConfig(Table):
    """Runs all forwards, then all backwards. Keeps the activations of all microbatches of a step in memory."""


class OneFOneBConfig(Table):
    """Alternates forwards and backwards. As fast as GPipe, but holds at most as many microbatches as there are stages."""


class InterleavedConfig(Table):
    """Runs 1F1B over several model chunks per stage, whose number divides the bubble and multiplies the transfers."""

    chunks: Annotated[int, Field(ge=2)] = 2
    """The number of model chunks per stage, which are assigned to the stages in a loop."""


class ZeroBubbleH1Config(Table):
    """Runs 1F1B with weight gradients where a stage would idle. Has a third of 1F1B's bubble and needs the same memory."""


class ZeroBubbleVConfig(Table):
    """Runs two model chunks per stage, placed as a V, with weight gradients where a stage would idle. Has almost no bubble."""


class CsvConfig(Table):
    """Runs a schedule from a CSV file of torch.distributed.pipelining."""

    file: PlanPath
    """The CSV file, which has a row per stage and a cell per action, such as `0F0`, `0B0`, `0I0` or `0W0`."""


class LinkConfig(Table):
    """Sends point-to-point messages between stages, and posts each receive before its message is sent."""


class UniformConfig(Table):
    """Cuts the model into parts whose numbers of layers differ by at most one."""


class BalancedConfig(Table):
    """Cuts the model so that the heaviest part is as light as possible."""

    layer_costs: Array[Annotated[float, Field(ge=0)]] | None = None
    """The cost of each layer, in any unit. The default is its number of parameters."""


class MeasuredConfig(Table):
    """Cuts the model so that the slowest part is as fast as possible, by measured times of each layer."""

    layer_costs: Array[Annotated[float, Field(ge=0)]] | None = None
    """The time of each layer in seconds; if left out, the run times the layers at its start and writes the times into the plan
    in its folder.
    """


class ExplicitConfig(Table):
    """Cuts the model into parts of explicit sizes."""

    layers: Annotated[Array[PositiveInt], Field(min_length=1)]
    """The number of layers of each part, in the model's order."""


class SharedModulesConfig(Table):
    """Sums the gradients of parameters that several stages hold, so that their copies stay equal."""

    drift_check_steps: NonNegativeInt = 0
    """The number of steps between bitwise comparisons of all copies; 0 never compares them."""

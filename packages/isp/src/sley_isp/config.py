"""The tables of the plugin `isp`; no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from sley_core.plan.tables import SequenceConfig
from sley_core.plan.types import Array, NonNegative, Positive, RecordReference, Table


class CommunicatorConfig(Table):
    """Shards linears and embeddings along their first dim, and gathers them just before they are used."""

    overlap: bool = True
    """Gather ahead and reduce in the background; false waits for each exchange at once, and gives the same bits."""

    unit: Literal["layer", "module"] = "layer"
    """What is gathered at a time: all sharded weights of a layer, or those of one module."""

    ahead: NonNegative = 1
    """How many units are gathered before they are needed."""

    launch: str = "*"
    """The modules of a layer, by their names within it, whose forward starts the gathers ahead: `"attention.output"`."""

    reductions: Positive = 4
    """How many modules' weight gradients may be on their way at once; each takes its full size until it is there."""

    pool: Annotated[str, RecordReference("memory_pools")] = "isp.slots"
    """Where buffers for whole weights and gradients come from."""


class AllToAllConfig(SequenceConfig):
    """Swaps slices of all heads for whole sequences of some heads before attention, and back after it."""

    modules: Array[str] = ()
    """More attention modules, by patterns of their names (`"*.attend"`): called with `q, k, v`, they return the context."""


class SlotsConfig(Table):
    """Keeps the buffers that come back, by size, and lends them again."""


class FreshConfig(Table):
    """Allocates every buffer anew."""

"""The tables of the plugin `isp`; no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from sley_core.api.plan import Array, NonNegative, Positive, RecordReference, SequenceConfig, Table

ANYWHERE = "*"
"""`launch` where every sharded module will do."""


class CommunicatorConfig(Table):
    """Shards linears and embeddings along their first dim, and gathers them just before they are used."""

    overlap: bool = True
    """Gather ahead and reduce in the background; false waits for each exchange at once, and gives the same bits."""

    unit: Literal["layer", "module"] = "layer"
    """What is gathered at a time: all sharded weights of a layer, or those of one module."""

    ahead: NonNegative = 1
    """How many units are gathered before they are needed."""

    launch: str = ANYWHERE
    """Just before which module of a layer, by its name within it or a pattern of names, the gathers ahead start:
    `"attention"`, `"attention.output"`, `"feed_forward"`. In a layer that has none, and left out: at the first sharded one.

    For `unit = "layer"`, in forwards and recomputations; a backward starts them at once.
    """

    fused: bool = True
    """Reduce the weight gradients of a unit in one exchange, as its weights are gathered; false: one per module."""

    reduce: Literal["micro_batch", "step"] = "micro_batch"
    """When weight gradients are reduced: after every micro-batch, or summed at full size and reduced once per step.

    Per step is one exchange instead of one per micro-batch, for memory: every sharded weight of the rank has a gradient
    of its full size from its first backward to the last, in `precision.gradients`.
    """

    reductions: Positive | None = None
    """How many exchanges of gradients may be live at once, the one being written included; each takes the full size.

    Left out: two fused ones, or those of four modules.
    """

    head: Literal["gather", "vocabulary"] = "gather"
    """What the model's last linear does: gather its weight like any other; or keep its rows, the vocabulary's slice, and take
    the tokens of all `wp` ranks instead, for `core.cross_entropy`."""

    embedding: Literal["gather", "hidden"] = "gather"
    """What plain embeddings do: gather their tables, cut by rows; or keep their columns, look these up for the tokens of all
    `wp` ranks, and swap the parts of vectors."""

    pool: Annotated[str, RecordReference("memory_pools")] = "isp.slots"
    """Where buffers for whole weights and gradients come from."""

    @property
    def bound(self) -> int:
        """`reductions`, or what it is when left out."""
        return self.reductions or (2 if self.fused and self.unit == "layer" else 4)


class AllToAllConfig(SequenceConfig):
    """Swaps slices of all heads for whole sequences of some heads before attention, and back after it."""

    modules: Array[str] = ()
    """More attention modules, by patterns of their names (`"*.attend"`): called with `q, k, v`, they return the context."""

    apart: Array[str] = ()
    """Convolutions and recurrent modules, by patterns of their names, that see one position at a time all the same."""


class SlotsConfig(Table):
    """Keeps the buffers that come back, by size, and lends them again."""


class FreshConfig(Table):
    """Allocates every buffer anew."""

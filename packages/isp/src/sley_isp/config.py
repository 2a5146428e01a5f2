"""The tables of the plugin `isp`; no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from sley_core.api.plan import Array, NonNegative, Positive, RecordReference, SequenceConfig, Table

ANYWHERE = "*"
"""`launch` where every sharded module will do."""


class CommunicatorConfig(Table):
    """Shards linears and embeddings along their first dim, and all-gathers them just before they are used."""

    overlap: bool = True
    """Prefetch and reduce in the background; false waits for each exchange at once, and gives the same bits."""

    unit: Literal["layer", "module"] = "layer"
    """What one all-gather unshards: all sharded weights of a layer, or those of one module."""

    ahead: NonNegative = 1
    """Number of layers, or modules, to prefetch."""

    launch: str = ANYWHERE
    """The module of a layer just before which prefetches start, by its name within the layer or a pattern of names:
    `"attention"`, `"attention.output"`, `"feed_forward"`. In a layer without such a module, and if left out: the first sharded
    one.

    For `unit = "layer"`, in forwards and recomputations; a backward starts prefetches at once.
    """

    reduce: Literal["micro_batch", "step"] = "micro_batch"
    """When weight gradients are reduced: after every micro-batch, or summed at full size and reduced once per step.

    Once per step is one exchange instead of one per micro-batch, for more memory: every sharded weight of the rank has a
    full-size gradient from its first backward to the last, in `precision.gradients`.
    """

    reductions: Positive | None = None
    """How many exchanges of gradients may be live at once, including the one being written; each takes the full size.

    Left out: those of two layers, or of four modules.
    """

    head: Literal["gather", "vocabulary"] = "gather"
    """What the model's last linear does: gather its weight like any other; or keep its rows, a slice of the vocabulary, and
    process the tokens of all `wp` ranks instead, for `core.cross_entropy`.
    """

    embedding: Literal["gather", "hidden"] = "gather"
    """What plain embeddings do: gather their tables, cut by rows; or keep their columns, look these up for the tokens of all
    `wp` ranks, and exchange the parts of vectors.
    """

    pool: Annotated[str, RecordReference("memory_pools")] | None = None
    """The pool of buffers for full-size weights and gradients; left out, the run's own."""

    @property
    def bound(self) -> int:
        """`reductions`, or its value when left out."""
        return self.reductions or (2 if self.unit == "layer" else 4)


class AllToAllConfig(SequenceConfig):
    """Exchanges slices of all heads for full sequences of some heads before attention, and back after it."""

    modules: Array[str] = ()
    """More attention modules, by patterns of their names (`"*.attend"`): called with `q, k, v`, they return the context."""

    apart: Array[str] = ()
    """Convolutions, norms, pooling and recurrent modules, by patterns of their names, that nevertheless see one position at a
    time; and layers that are not asked in the first step whether they mix positions.
    """

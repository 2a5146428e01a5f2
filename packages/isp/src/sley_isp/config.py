"""The plan tables of the plugin `isp`. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from sley_core.api.plan import Array, SequenceConfig, Table

ANYWHERE = "*"
"""The `launch` pattern that matches every sharded module."""


class CommunicatorConfig(Table):
    """Shards parameters along their first dim, and all-gathers them just before each use."""

    overlap: bool = True
    """Whether to prefetch and reduce in the background. If false, each exchange is awaited at once, with the same bits."""

    unit: Literal["layer", "module"] = "layer"
    """The weights of one all-gather: all sharded weights of a layer, or those of one module."""

    ahead: NonNegativeInt = 1
    """The number of layers or modules to prefetch."""

    launch: str = ANYWHERE
    """The module before which prefetches start, by its name within the layer or a pattern of names, such as `"attention"`,
    `"attention.output"` or `"feed_forward"`. The default, also if no name matches, is the first sharded module of the layer.
    Only for `unit = "layer"`, in forwards and recomputations. A backward starts prefetches at once.
    """

    reduce: Literal["micro_batch", "step"] = "micro_batch"
    """The time when weight gradients are reduced: after every microbatch, or once per step.

    Once per step saves exchanges but needs more memory, since every sharded weight has a full-size gradient in
    `precision.gradients` from its first backward to its last.
    """

    reductions: PositiveInt | None = None
    """The limit of gradient exchanges that exist at once, including the one being written. Each needs memory for the full-size
    gradients of a unit. Default: 2 for layers, 4 for modules.
    """

    head: Literal["gather", "vocabulary"] = "gather"
    """The treatment of the model's last linear: `gather` gathers its weight like any other, `vocabulary` lets each rank compute
    its rows, a slice of the vocabulary, for the tokens of all `wp` ranks. `vocabulary` needs a loss of split logits, such as
    `core.cross_entropy`.
    """

    embedding: Literal["gather", "hidden"] = "gather"
    """The treatment of plain embeddings: `gather` shards tables by rows and gathers them, `hidden` shards them by columns, and
    exchanges the tokens and the parts of their vectors.
    """

    @property
    def max_reductions(self) -> int:
        """`reductions`, or its default."""
        return self.reductions or (2 if self.unit == "layer" else 4)


class AllToAllConfig(SequenceConfig):
    """Exchanges slices of all heads for full sequences of some heads before attention, and back after it."""

    modules: Array[str] = ()
    """Patterns of the names of more attention modules, such as `"*.attend"`, which are called with `q, k, v` and return the
    context.
    """

    unchecked_layers: Array[str] = ()
    """Patterns of the names of convolutions, norms, pooling and recurrent modules that see one position at a time, and of
    layers that the first step does not check for mixing positions.
    """

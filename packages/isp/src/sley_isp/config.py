"""The plan tables of the plugin `isp`. Imports no torch."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt

from sley_core.api.plan import Array, SequenceConfig, Table

ANYWHERE = "*"
"""The `launch` pattern that matches every sharded module."""

FP8_BYTES = 1 + 4 / 128
"""The bytes of an element in e4m3 numbers, with its part of the fp32 scale of a block."""

FP8_TOLERANCE = 2**-4
"""The relative error of e4m3 numbers, which have 3 bits of mantissa."""


class WeightGroupConfig(Table):
    """Options of the weights that match a pattern. The first matching group applies. The table has the other defaults."""

    match: Annotated[str, Field(min_length=1)]
    """A pattern of parameter names, in which `*` matches any text, including dots: `"*.experts.*"`."""

    unit: Literal["layer", "module"] | None = None
    """The weights of one all-gather."""

    ahead: NonNegativeInt | None = None
    """The number of layers or modules by which gathers are ahead of their use."""

    reduce: Literal["micro_batch", "step"] | None = None
    """The time when gradients are reduced."""

    gather_precision: Literal["full", "fp8"] | None = None
    """The precision in which ranks send weights."""


class CommunicatorConfig(Table):
    """Shards parameters along their first dim, and all-gathers them just before each use."""

    overlap: bool = True
    """Whether to prefetch and reduce in the background. If false, each exchange is awaited at once, with the same bits."""

    unit: Literal["layer", "module"] = "layer"
    """The weights of one all-gather: all sharded weights of a layer, or those of one plain linear or embedding."""

    ahead: NonNegativeInt = 1
    """The number of layers or modules to prefetch."""

    launch: str = ANYWHERE
    """The module before which prefetches start, by its name within the layer or a pattern of names, such as `"attention"`,
    `"attention.output"` or `"feed_forward"`. The default, also if no name matches, is every sharded module. A backward starts
    prefetches at once.
    """

    reduce: Literal["micro_batch", "step"] = "micro_batch"
    """The time when weight gradients are reduced: after every microbatch, or once per step.

    Once per step saves exchanges but needs more memory, since every sharded weight has a full-size gradient in
    `precision.gradients` from its first backward to its last.
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

    gather_precision: Literal["full", "fp8"] = "full"
    """The precision in which ranks send weights: as they are, or as e4m3 numbers with a scale for each 128 elements.

    `fp8` sends about half of the bytes of bf16. All ranks compute with the rounded weights, whose relative error is at most
    2^-4. Optimizer steps and gradients are not rounded.
    """

    groups: Array[WeightGroupConfig] = ()
    """Groups of weights with their own options, such as the experts of a layer. Their gathers are separate."""

    def group_index(self, name: str) -> int | None:
        """Returns the index of the first group that matches the parameter `name`, or None."""
        return next((index for index, group in enumerate(self.groups) if fnmatchcase(name, group.match)), None)

    def with_group(self, index: int | None) -> CommunicatorConfig:
        """Returns this table with the options of the group `index`."""
        values = {} if index is None else self.groups[index].model_dump(exclude={"match"}, exclude_none=True)
        return self.model_copy(update=values)


class AllToAllConfig(SequenceConfig):
    """Exchanges slices of all heads for full sequences of some heads before attention, and back after it."""

    modules: Array[str] = ()
    """Patterns of the names of more attention modules, such as `"*.attend"`, which are called with `q, k, v` and return the
    context.
    """

    unchecked_layers: Array[str] = ()
    """Patterns of the names of layers that are not checked for mixing positions."""

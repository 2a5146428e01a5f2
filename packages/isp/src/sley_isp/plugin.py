"""The plan tables and records of the plugin `isp`, and checks of their options in a plan. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, NonNegativeInt

from sley_core.api.plan import Array, SequenceConfig, Table
from sley_core.hookspecs import hookimpl
from sley_core.records import LossRecord, Problem, Record, SequenceAttentionRecord, WeightCommunicatorRecord

if TYPE_CHECKING:
    from sley_core.api.plan import Plan

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


CANONICAL_VALUES = {
    "reduce": ("micro_batch", "sums microbatches before it sums ranks"),
    "head": ("gather", "sums over slices of the vocabulary, whose matrix products have different shapes"),
    "embedding": ("gather", "sums the tokens of all ranks at once"),
    "gather_precision": ("full", "rounds the weights in blocks that depend on the layout"),
}
"""The value that canonical sums need for each option, and the reason why they exclude the other value."""


@hookimpl
def sley_records() -> list[Record]:
    """Returns the weight communicator and the sequence attention."""
    return [
        WeightCommunicatorRecord(
            name="communicator",
            config=CommunicatorConfig,
            build="sley_isp.communicator:Communicator",
            fixed_order=True,
            tolerance=lambda config: (
                FP8_TOLERANCE if any(table.gather_precision == "fp8" for table in (config, *config.groups)) else 0.0
            ),
            gather_bytes=lambda config, itemsize: FP8_BYTES if config.gather_precision == "fp8" else itemsize,
        ),
        SequenceAttentionRecord(name="all_to_all", config=AllToAllConfig, build="sley_isp.attention:AllToAllAttention"),
    ]


@hookimpl(optionalhook=True)
def sley_estimate_hints() -> dict[str, Any]:
    """Returns the variants of both records that a search tries."""
    return {"isp.communicator": {"variants": [{}, {"reduce": "step"}]}, "isp.all_to_all": {"variants": [{}]}}


@hookimpl
def sley_check_plan(plan: Plan) -> Iterator[Problem]:
    """Yields the problems of this plugin's tables. Module names and shapes are checked when the model is built."""
    sp, heads = plan.parallel.sp, getattr(plan.model.config, "heads", None)
    is_split = plan.sequence is not None and isinstance(plan.sequence.config, AllToAllConfig)
    if is_split and isinstance(heads, int) and heads % sp:  # in a custom model, the first attention checks it
        divisors = [str(divisor) for divisor in range(1, min(heads, sp) + 1) if heads % divisor == 0]
        message = f"the number of heads must be a multiple of sp = {sp}, but is {heads}"
        yield Problem(("parallel", "sp"), message, f"set `sp` = {' or '.join(divisors)}", "sequence-heads")
    if plan.weights is None or not isinstance(plan.weights.config, CommunicatorConfig):
        return
    config, loss = plan.weights.config, plan.loss.record
    if config.head == "vocabulary" and not (isinstance(loss, LossRecord) and loss.split_logits):
        message = (
            f'the loss `{plan.loss.name}` needs all logits of a token, but with `head = "vocabulary"` each rank has only some'
        )
        yield Problem(("weights", "head"), message, 'set `head = "gather"`, or use `core.cross_entropy`', "head-loss")
    if plan.model.config.compile and plan.parallel.wp > 1:
        for key in ("head", "embedding"):
            if (value := getattr(config, key)) != "gather":
                message = f'compiled layers gather their weights before each call, so `{key} = "{value}"` is not possible'
                yield Problem(("weights", key), message, "remove it, or remove `[model] compile`", "weights-compiled")
    if plan.parallel.reduction != "canonical" or plan.parallel.wp == 1:
        return
    tables: list[tuple[tuple[str | int, ...], Any]] = [((), config)]
    tables += [(("groups", index), group) for index, group in enumerate(config.groups)]
    for (path, table), (key, (canonical_value, reason)) in product(tables, CANONICAL_VALUES.items()):
        if (value := getattr(table, key, None)) not in (canonical_value, None):
            message = f'`{key} = "{value}"` {reason}, so `reduction = "canonical"` is not possible'
            hint = f'set {key} = "{canonical_value}", or `[parallel] reduction = "fast"`'
            yield Problem(("weights", *path, key), message, hint, "canonical-unsupported")

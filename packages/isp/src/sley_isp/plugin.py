"""The plan tables and records of the plugin `isp`, and checks of their options in a plan. Imports no torch."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import product
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt

from sley_core.api.plan import Array, Plan, SequenceConfig, Table
from sley_core.hookspecs import hookimpl
from sley_core.records import LossRecord, Problem, Record, SequenceAttentionRecord, WeightCommunicatorRecord

ANYWHERE = "*"
"""The value of `launch` with which prefetches start before every sharded module."""

FP8_BYTES = 1 + 4 / 128
"""The bytes per element that are sent with `gather_precision = "fp8"`: an e4m3 number, and 1/128 of its block's fp32 scale."""

FP8_TOLERANCE = 2**-4
"""The largest relative error of e4m3 numbers, which have 3 bits of mantissa."""


class WeightGroupConfig(Table):
    """Options that replace the options of `[weights]` for weights that match a pattern. The first matching group applies."""

    match: Annotated[str, Field(min_length=1)]
    """A pattern of parameter names, in which `*` matches any text, including dots: `"*.experts.*"`."""

    unit: Literal["layer", "module"] | None = None
    """The weights that one all-gather gathers."""

    ahead: NonNegativeInt | None = None
    """The number of layers or modules to prefetch."""

    reduce: Literal["micro_batch", "step"] | None = None
    """Whether gradients are reduced after every microbatch or once per step."""

    gather_precision: Literal["full", "fp8"] | None = None
    """The precision in which ranks send weights."""


class CommunicatorConfig(Table):
    """Shards parameters, usually along their first dim, and all-gathers them just before each use."""

    overlap: bool = True
    """Whether to prefetch and reduce in the background, or wait for each exchange. The results are the same bit for bit."""

    unit: Literal["layer", "module"] = "layer"
    """The weights that one all-gather gathers: all sharded weights of a layer, or of one plain linear or embedding."""

    ahead: NonNegativeInt = 1
    """The number of layers or modules to prefetch."""

    launch: str = ANYWHERE
    """The modules before whose forwards prefetches start: a name or pattern within the layer, such as `"attention"` or
    `"attention.output"`. By default, in backwards, and in layers without a match, prefetches start before every sharded module.
    """

    reduce: Literal["micro_batch", "step"] = "micro_batch"
    """Whether weight gradients are reduced after every microbatch or once per step. `"step"` saves exchanges but needs a
    full-size gradient of dtype `precision.gradients` for every sharded weight, from its first backward in a step to its last.
    """

    head: Literal["gather", "vocabulary"] = "gather"
    """How ranks compute the model's last linear. `gather` gathers its weight. With `vocabulary`, each rank computes the logits
    of its vocabulary slice for the tokens of all `wp` ranks. This needs a loss for split logits, such as `core.cross_entropy`.
    """

    embedding: Literal["gather", "hidden"] = "gather"
    """How ranks compute plain embeddings: `gather` gathers tables, `hidden` shards them by columns and exchanges vectors."""

    gather_precision: Literal["full", "fp8"] = "full"
    """The precision in which ranks send weights. `full` sends them in their dtype, `fp8` as e4m3 numbers with one scale for
    each block of 128 elements: about half as many bytes as bf16. All ranks compute with the rounded weights, whose relative
    error is at most 2^-4. Gradients and the weights that the optimizer updates are not rounded.
    """

    groups: Array[WeightGroupConfig] = ()
    """Groups of weights with their own options, such as the experts of a layer. Each group has its own all-gathers."""

    def group_index(self, name: str) -> int | None:
        """Returns the index of the first group that matches the parameter `name`, or None."""
        return next((index for index, group in enumerate(self.groups) if fnmatchcase(name, group.match)), None)

    def with_group(self, index: int | None) -> "CommunicatorConfig":
        """Returns this table with the options of the group `index`, or unchanged if `index` is None."""
        values = {} if index is None else self.groups[index].model_dump(exclude={"match"}, exclude_none=True)
        return self.model_copy(update=values)


class AllToAllConfig(SequenceConfig):
    """Exchanges slices of all heads for full sequences of some heads before attention, and does the reverse after it."""

    modules: Array[str] = ()
    """Patterns of the names of more attention modules, such as `"*.attend"`, which take `q, k, v` and return the context."""

    unchecked_layers: Array[str] = ()
    """Patterns of the names of layers that the run does not check for operations that mix positions."""


CANONICAL_VALUES = {
    "reduce": ("micro_batch", "sums microbatches before it sums ranks"),
    "head": ("gather", "sums over slices of the vocabulary, whose matrix products have different shapes"),
    "embedding": ("gather", "sums the tokens of all ranks at once"),
    "gather_precision": ("full", "rounds the weights in blocks that depend on the layout"),
}
"""For each key, the only value that `reduction = "canonical"` supports, and the reason why the other value is not supported."""


@hookimpl
def sley_records() -> list[Record]:
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
    return {"isp.communicator": {"variants": [{}, {"reduce": "step"}]}, "isp.all_to_all": {"variants": [{}]}}


@hookimpl
def sley_check_plan(plan: Plan) -> Iterator[Problem]:
    """Yields the problems in this plugin's tables. Module names and shapes are checked later, when the model is built."""
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
            f'the loss `{plan.loss.name}` needs all logits of a token, but with `head = "vocabulary"` each rank has only '
            "some of them"
        )
        yield Problem(("weights", "head"), message, 'set `head = "gather"`, or use `core.cross_entropy`', "head-loss")
    if plan.model.config.compile and plan.parallel.wp > 1:
        for key in ("head", "embedding"):
            if (value := getattr(config, key)) != "gather":
                message = f'compiled layers gather their weights before each call, so `{key} = "{value}"` is not possible'
                yield Problem(("weights", key), message, "remove this key, or remove `[model] compile`", "weights-compiled")
    if plan.parallel.reduction != "canonical" or plan.parallel.wp == 1:
        return
    tables: list[tuple[tuple[str | int, ...], Any]] = [((), config)]
    tables += [(("groups", index), group) for index, group in enumerate(config.groups)]
    for (path, table), (key, (canonical_value, reason)) in product(tables, CANONICAL_VALUES.items()):
        if (value := getattr(table, key, None)) not in (canonical_value, None):
            message = f'`{key} = "{value}"` {reason}, so `reduction = "canonical"` is not possible'
            hint = f'set {key} = "{canonical_value}", or `[parallel] reduction = "fast"`'
            yield Problem(("weights", *path, key), message, hint, "canonical-unsupported")

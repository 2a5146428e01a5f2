"""The plan tables, records, process groups and checks of the plugin `dp`. Imports no torch."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat

from sley_core.api.plan import Plan, Table, Topology
from sley_core.hookspecs import hookimpl
from sley_core.records import GradientHandlerRecord, Problem, ProcessGroupRecord

BF16_TOLERANCE = 2**-7
"""The allowed relative error of a bf16 sum if no terms cancel: each term and the sum are rounded once, by at most 2^-8."""


class ReducerConfig(Table):
    """The keys that the reducers of `dp` share."""

    bucket_mb: PositiveFloat = 25.0
    """The maximum size of a bucket of gradients in MiB. A larger parameter gets its own bucket."""

    @property
    def bucket_bytes(self) -> float:
        """The size limit of a bucket of gradients, in bytes. Only a bucket of a single parameter may exceed it."""
        return self.bucket_mb * (1 << 20)


class BucketedConfig(ReducerConfig):
    """Sums gradients over the ranks that share a weight, bucket by bucket, during the backward."""

    reduction: Literal["same", "bf16"] = "same"
    """The dtype in which gradients are sent. `"same"` is the dtype in which they are accumulated. `"bf16"` sends half as many
    bytes as fp32, but rounds.
    """

    @property
    def tolerance(self) -> float:
        """The allowed relative error of a sum, which is 0 for exact sums."""
        return BF16_TOLERANCE if self.reduction == "bf16" else 0.0


class ShardedConfig(ReducerConfig):
    """Reduce-scatters gradients over the ranks that share a weight. Each rank updates one shard, and holds only this shard of
    the master weights and optimizer states.
    """

    shards: Annotated[int, Field(ge=2)] | None = None
    """The number of neighbouring ranks that share one copy of master weights and optimizer states. The default is all ranks
    that share a weight.
    """


SUMS_CHANNEL = "sums"
"""The name of the channel on which `dp.sharded` sums gradients."""

WEIGHTS_CHANNEL = "weights"
"""The name of the channel on which `dp.sharded` gathers weights. A separate channel keeps slow gathers from delaying sums."""


def shards_axis(reduce_group: str) -> str:
    """Returns the name of the axis that divides each group of `reduce_group` into groups that hold one copy of the optimizer
    states together.
    """
    return f"dp.shards.{reduce_group}"


def copies_axis(reduce_group: str) -> str:
    """Returns the name of the axis whose groups hold the same shard. They divide each group of the axis `reduce_group`."""
    return f"dp.copies.{reduce_group}"


@hookimpl
def sley_gradient_handlers() -> list[GradientHandlerRecord]:
    return [
        GradientHandlerRecord(
            name="bucketed",
            config=BucketedConfig,
            build="sley_dp.reducers:BucketedReducer",
            role="reducer",
            fixed_order=True,
            tolerance=lambda config: config.tolerance,
        ),
        GradientHandlerRecord(
            name="sharded",
            config=ShardedConfig,
            build="sley_dp.reducers:ShardedReducer",
            role="reducer",
            result="shard",
            fixed_order=True,
        ),
    ]


@hookimpl(optionalhook=True)
def sley_estimate_hints() -> dict[str, Any]:
    """Returns the keys with which a search for a layout tries each reducer; {} stands for the defaults."""
    return {"dp.bucketed": {"variants": [{}]}, "dp.sharded": {"variants": [{}]}}


@hookimpl
def sley_process_groups(plan: Plan, topology: Topology) -> Iterable[ProcessGroupRecord]:
    for handler in plan.gradient_handlers:
        if isinstance(handler.config, ShardedConfig):
            yield from shard_groups(handler.config.shards, topology)


@hookimpl
def sley_check_plan(plan: Plan, topology: Topology) -> Iterable[Problem]:
    """Yields a problem if `shards` does not divide the size of a reduce group, or would split a canonical sum."""
    for index, handler in enumerate(plan.gradient_handlers):
        if not isinstance(handler.config, ShardedConfig) or handler.config.shards is None:
            continue
        shards, location = handler.config.shards, ("gradient_handlers", index, "shards")
        sizes = {axis: topology.size_of(axis) for axis in reduction_axes(topology)}
        for axis, size in sizes.items():
            if size % shards:
                divisors = [str(divisor) for divisor in range(2, size + 1) if size % divisor == 0]
                message = f"the size of the reduce group `{axis}` must be a multiple of shards = {shards}, but is {size}"
                hint = f"set shards = {' or '.join(divisors)}, or remove the key to shard over all ranks of the group"
                yield Problem(location, message, hint, "shards-do-not-divide")
                break
        if plan.parallel.reduction == "canonical" and any(shards < size for size in sizes.values()):
            num_copies = max(sizes.values()) // shards
            message = f'`shards = {shards}` computes {num_copies} separate sums, so `reduction = "canonical"` is not possible'
            hint = 'remove `shards`, or set `[parallel] reduction = "fast"`'
            yield Problem(location, message, hint, "canonical-unsupported")


def reduction_axes(topology: Topology) -> list[str]:
    """Returns the axes over which gradients are reduced, except axes whose groups have only one rank."""
    axes = ("stage", "wdp") if topology.wp > 1 else ("stage",)
    return [axis for axis in axes if topology.size_of(axis) > 1]


def shard_groups(shards: int | None, topology: Topology) -> Iterator[ProcessGroupRecord]:
    """Yields the groups of ranks that share a copy of optimizer states, and the groups of ranks that hold the same shard.
    shards: the number of ranks that share a copy; None for the whole reduce group. For a reduce group of 8 ranks and shards =
    4, 0 1 2 3 and 4 5 6 7 share a copy, and 0 4, 1 5, 2 6, 3 7 hold the same shard.
    """
    for axis in reduction_axes(topology):
        groups = list(topology.partition(axis))
        num_shards = shards or topology.size_of(axis)
        ranks_per_copy = tuple(
            ranks[start : start + num_shards] for ranks in groups for start in range(0, len(ranks), num_shards)
        )
        yield ProcessGroupRecord(shards_axis(axis), ranks_per_copy, (SUMS_CHANNEL, WEIGHTS_CHANNEL), cross_memory=True)
        if num_shards < topology.size_of(axis):
            ranks_per_shard = tuple(ranks[shard::num_shards] for ranks in groups for shard in range(num_shards))
            yield ProcessGroupRecord(copies_axis(axis), ranks_per_shard, cross_memory=True)

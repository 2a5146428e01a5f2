"""The tables of the plugin `dp`, and the groups of ranks that share an optimizer's states. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from sley_core.api.plan import PositiveFloat, Table
from sley_core.records import Problem, ProcessGroupRecord

if TYPE_CHECKING:
    from sley_core.api.plan import Plan, Topology


BF16_TOLERANCE = 2**-7
"""Each rank's term and the sum are rounded to bf16 once, by 2^-8 at most; ranks whose terms cancel may be further off."""


class ReducerConfig(Table):
    """The keys that every reducer of `dp` has."""

    bucket_mb: PositiveFloat = 25.0
    """MiB of gradients per bucket; a larger parameter gets a bucket of its own."""

    start: Literal["check", "broadcast"] = "check"
    """What to do with replicas that do not start equal: refuse them before the first step, or give them the first one's weights
    and buffers.
    """

    @property
    def bucket_bytes(self) -> float:
        """The most bytes of gradients in a bucket, but for a larger parameter."""
        return self.bucket_mb * (1 << 20)


class BucketedConfig(ReducerConfig):
    """Sums gradients over the ranks that share a weight, bucket by bucket, during the backward."""

    reduction: Literal["same", "bf16"] = "same"
    """The format in which gradients are sent: that of accumulation, or bf16, half of fp32's bytes and not exact."""

    @property
    def tolerance(self) -> float:
        """The relative error that a sum may have; 0 if the sum is exact."""
        return BF16_TOLERANCE if self.reduction == "bf16" else 0.0


class ShardedConfig(ReducerConfig):
    """Reduce-scatters gradients over the ranks that share a weight; each rank steps its part, with the masters and states of
    that part.
    """

    shards: Annotated[int, Field(ge=2)] | None = None
    """How many neighbouring ranks share one copy of masters and states; left out, all ranks that share a weight."""


SUMS = "sums"
WEIGHTS = "weights"
"""The lanes of the ranks that share a copy: a gather of weights, which may wait for a layer, must not delay a sum."""


def shards_axis(reduce_group: str) -> str:
    """Returns the name of the axis of the ranks that share one copy of the states of what is reduced over `reduce_group`."""
    return f"dp.shards.{reduce_group}"


def copies_axis(reduce_group: str) -> str:
    """Returns the name of the axis of the ranks of `reduce_group` that hold the same shard."""
    return f"dp.copies.{reduce_group}"


def reduce_groups(topology: Topology) -> list[str]:
    """Returns the names of the axes of two or more ranks over which gradients are reduced."""
    axes = ("stage", "wdp") if topology.wp > 1 else ("stage",)
    return [axis for axis in axes if topology.size_of(axis) > 1]


def shard_groups(shards: int | None, topology: Topology) -> Iterator[ProcessGroupRecord]:
    """Yields the groups that `dp.sharded` needs: of the ranks that share a copy of the states, and if there are several copies,
    of those that hold the same shard. `shards` is how many ranks share one; it divides the size of every reduce group, or is
    None for all of it.

    reduce group of 8 ranks, shards = 4 | 0 1 2 3 | 4 5 6 7 | ranks that share one copy: neighbours 0-4 1-5 2-6 3-7 ranks that
    hold the same shard
    """
    for axis in reduce_groups(topology):
        every = list(topology.partition(axis))
        count = shards or topology.size_of(axis)
        together = tuple(ranks[at : at + count] for ranks in every for at in range(0, len(ranks), count))
        yield ProcessGroupRecord(shards_axis(axis), together, (SUMS, WEIGHTS), attaches=True)
        if count < topology.size_of(axis):
            alike = tuple(ranks[place::count] for ranks in every for place in range(count))
            yield ProcessGroupRecord(copies_axis(axis), alike, attaches=True)


def check_shards(topology: Topology, shards: int | None, number: int) -> Iterator[Problem]:
    """Yields a problem if `shards`, of gradient handler `number`, does not divide a group over which gradients are reduced."""
    for axis in reduce_groups(topology):
        size = topology.size_of(axis)
        if shards is not None and size % shards:
            fits = [str(one) for one in range(2, size + 1) if size % one == 0]
            message = f"{size} ranks (`{axis}`) reduce a gradient together, which are no multiple of shards = {shards}"
            hint = f"use shards = {' or '.join(fits)}, or leave it out for all of them"
            yield Problem(("gradient_handlers", number, "shards"), message, hint, "shards-do-not-divide")
            return


def check_one_copy(plan: Plan, topology: Topology, shards: int | None, number: int) -> Iterator[Problem]:
    """Yields a problem if there are several copies of the states, whose ranks would sum among themselves first, but sums have a
    fixed order.
    """
    if plan.parallel.reduction != "canonical":
        return
    sizes = [topology.size_of(axis) for axis in reduce_groups(topology)]
    if shards is not None and any(shards < size for size in sizes):
        message = f"`shards = {shards}` adds up {max(sizes) // shards} copies apart, and sums of the plan are canonical"
        hint = 'leave `shards` out, or use `[parallel] reduction = "fast"`'
        yield Problem(("gradient_handlers", number, "shards"), message, hint, "canonical-unsupported")

"""Declares the records, process groups and checks of the plugin `dp`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from sley_core.hookspecs import hookimpl
from sley_core.records import GradientHandlerRecord, Problem, ProcessGroupRecord
from sley_dp.config import SUMS, WEIGHTS, BucketedConfig, ShardedConfig, copies_axis, shards_axis

if TYPE_CHECKING:
    from sley_core.api.plan import Plan, Topology


@hookimpl
def sley_gradient_handlers() -> list[GradientHandlerRecord]:
    return [
        GradientHandlerRecord(
            name="bucketed",
            config=BucketedConfig,
            build="sley_dp.bucketed:Bucketed",
            role="reducer",
            fixed_order=True,
            tolerance_of=lambda config: config.tolerance,
            summary="Flat buckets, reduced while the backward runs.",
        ),
        GradientHandlerRecord(
            name="sharded",
            config=ShardedConfig,
            build="sley_dp.sharded:Sharded",
            role="reducer",
            result="shard",
            fixed_order=True,
            summary="Flat buckets, of which each rank steps a part: optimizer states and masters are shared (ZeRO-1).",
        ),
    ]


@hookimpl(optionalhook=True)
def sley_estimate_hints() -> dict[str, Any]:
    return {"dp.bucketed": {"variants": [{}]}, "dp.sharded": {"variants": [{}]}}


@hookimpl
def sley_process_groups(plan: Plan, topology: Topology) -> Iterable[ProcessGroupRecord]:
    for handler in plan.gradient_handlers:
        if isinstance(handler.config, ShardedConfig):
            yield from shard_groups(handler.config.shards, topology)


@hookimpl
def sley_check_plan(plan: Plan, topology: Topology) -> Iterable[Problem]:
    """Yields a problem if `shards` of `dp.sharded` does not divide a group, or makes several copies of canonical sums."""
    for number, handler in enumerate(plan.gradient_handlers):
        if not isinstance(handler.config, ShardedConfig) or handler.config.shards is None:
            continue
        shards, place = handler.config.shards, ("gradient_handlers", number, "shards")
        sizes = {axis: topology.size_of(axis) for axis in reduce_groups(topology)}
        for axis, size in sizes.items():
            if size % shards:
                divisors = [str(divisor) for divisor in range(2, size + 1) if size % divisor == 0]
                message = f"{size} ranks (`{axis}`) reduce a gradient together, which are no multiple of shards = {shards}"
                hint = f"use shards = {' or '.join(divisors)}, or leave it out for all of them"
                yield Problem(place, message, hint, "shards-do-not-divide")
                break
        if plan.parallel.reduction == "canonical" and any(shards < size for size in sizes.values()):
            copies = max(sizes.values()) // shards
            message = f"`shards = {shards}` adds up {copies} copies apart, and sums of the plan are canonical"
            hint = 'leave `shards` out, or use `[parallel] reduction = "fast"`'
            yield Problem(place, message, hint, "canonical-unsupported")


def reduce_groups(topology: Topology) -> list[str]:
    """Returns the names of the axes of two or more ranks over which gradients are reduced."""
    axes = ("stage", "wdp") if topology.wp > 1 else ("stage",)
    return [axis for axis in axes if topology.size_of(axis) > 1]


def shard_groups(shards: int | None, topology: Topology) -> Iterator[ProcessGroupRecord]:
    """Yields the groups of the ranks that share a copy of the states and, if there are several copies, of those that hold the
    same shard.

    A reduce group of 8 ranks with shards = 4: 0 1 2 3 | 4 5 6 7 share a copy, 0-4 1-5 2-6 3-7 hold the same shard. shards:
    divides the size of every reduce group; None for all of it.
    """
    for axis in reduce_groups(topology):
        groups = list(topology.partition(axis))
        count = shards or topology.size_of(axis)
        together = tuple(ranks[at : at + count] for ranks in groups for at in range(0, len(ranks), count))
        yield ProcessGroupRecord(shards_axis(axis), together, (SUMS, WEIGHTS), attaches=True)
        if count < topology.size_of(axis):
            alike = tuple(ranks[place::count] for ranks in groups for place in range(count))
            yield ProcessGroupRecord(copies_axis(axis), alike, attaches=True)

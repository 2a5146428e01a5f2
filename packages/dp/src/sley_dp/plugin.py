"""Declares the records, process groups and checks of the plugin `dp`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sley_core.hookspecs import hookimpl
from sley_core.records import GradientHandlerRecord, Problem, ProcessGroupRecord
from sley_dp.config import BucketedConfig, ShardedConfig

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
            from sley_dp.config import shard_groups  # only `dp.sharded` needs them

            yield from shard_groups(handler.config.shards, topology)


@hookimpl
def sley_check_plan(plan: Plan, topology: Topology) -> Iterable[Problem]:
    """Yields problems of the options of `dp.sharded`."""
    for number, handler in enumerate(plan.gradient_handlers):
        if isinstance(handler.config, ShardedConfig):
            from sley_dp.config import check_one_copy, check_shards

            yield from check_shards(topology, handler.config.shards, number)
            yield from check_one_copy(plan, topology, handler.config.shards, number)

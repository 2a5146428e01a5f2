"""Hooks that offer memory pools, offload managers and activation policies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sley_core.hookspecs.markers import hookspec

if TYPE_CHECKING:
    from sley_core import records


@hookspec
def sley_memory_pools() -> Iterable[records.MemoryPoolRecord]:  # type: ignore[empty-body]
    """Offers memory pools, which lend buffers.

    `build(config) -> MemoryPool`.

    Called: when the plan is resolved
    Ranks: all
    May communicate: no
    Returns: records, or nothing
    Since: core 0.1
    Example:
        @hookimpl
        def sley_memory_pools():
            return [MemoryPoolRecord(name="arena", config=ArenaConfig, build="my_plugin.arena:Arena")]
    """


@hookspec
def sley_offload_managers() -> Iterable[records.OffloadManagerRecord]:  # type: ignore[empty-body]
    """Offers managers that move memory off the device and back, for tables `[[offload]]`.

    `build(config) -> OffloadManager`.

    Called: when the plan is resolved
    Ranks: all
    May communicate: no
    Returns: records, or nothing
    Since: core 0.1
    Example:
        @hookimpl
        def sley_offload_managers():
            return [
                OffloadManagerRecord(
                    name="disk", config=DiskConfig, build="my_plugin.disk:Disk", parts=lambda config: ["optimizer_states"]
                )
            ]
    """


@hookspec
def sley_activation_policies() -> Iterable[records.ActivationPolicyRecord]:  # type: ignore[empty-body]
    """Offers activation policies, which decide what a layer keeps for its backward.

    `build(config, layer_names) -> ActivationPolicy`.

    Called: when the plan is resolved
    Ranks: all
    May communicate: no
    Returns: records, or nothing
    Since: core 0.1
    Example:
        @hookimpl
        def sley_activation_policies():
            return [ActivationPolicyRecord(name="odd", config=OddConfig, build="my_plugin.odd:build")]
    """

"""What the plugin `memory` has."""

from __future__ import annotations

from sley_core.hookspecs import hookimpl
from sley_core.records import MemoryPoolRecord, OffloadManagerRecord, Scope
from sley_memory.config import (
    EverythingConfig,
    GradientsConfig,
    HostOptimizerConfig,
    MastersConfig,
    OffloadConfig,
    SizeClassesConfig,
    StatesConfig,
    WeightsConfig,
)


@hookimpl
def sley_memory_pools() -> list[MemoryPoolRecord]:
    return [
        MemoryPoolRecord(
            name="size_classes",
            config=SizeClassesConfig,
            build="sley_memory.size_classes:SizeClasses",
            summary="Keeps blocks by rounded size and lends views of them, to users of many sizes.",
        )
    ]


@hookimpl
def sley_offload_managers() -> list[OffloadManagerRecord]:
    def record(name: str, config: type[OffloadConfig], summary: str) -> OffloadManagerRecord:
        build = "sley_memory.offload.manager:Manager"
        return OffloadManagerRecord(name=name, config=config, build=build, summary=summary, parts=_moves, scope=_scope)

    return [
        record("weights", WeightsConfig, "Parameters and module buffers to the host and back, by call."),
        record("masters", MastersConfig, "fp32 masters to the host and back, by call."),
        record("optimizer_states", StatesConfig, "Optimizer states, by call or between all steps."),
        record("gradients", GradientsConfig, "Gradients freed and made anew, by call."),
        OffloadManagerRecord(
            name="host_optimizer",
            config=HostOptimizerConfig,
            build="sley_memory.offload.host_optimizer:HostOptimizer",
            summary="Masters and optimizer states on the host, which steps them there.",
            parts=_moves,
            scope=_scope,
            steps_on_host=True,
        ),
        record("everything", EverythingConfig, "All of a run's memory, by call."),
    ]


def _moves(config: OffloadConfig) -> tuple[str, ...]:
    return config.moves


def _scope(config: OffloadConfig) -> Scope:
    """Stepping in buckets needs updates that do not depend on one another."""
    return "per_matrix" if config.steps_in_buckets else "global"

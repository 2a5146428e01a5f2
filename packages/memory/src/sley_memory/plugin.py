"""Declares what the plugin `memory` has."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from sley_core.hookspecs import hookimpl
from sley_core.records import ActivationPolicyRecord, MemoryPoolRecord, OffloadManagerRecord, Problem, Record, Scope
from sley_memory.config import (
    EverythingConfig,
    GradientsConfig,
    HostConfig,
    HostOptimizerConfig,
    MastersConfig,
    OffloadConfig,
    SelectiveConfig,
    SizeClassesConfig,
    StatesConfig,
    WeightsConfig,
)

if TYPE_CHECKING:
    from sley_core.api.plan import Plan


_MOVES = attrgetter("moves")


@hookimpl
def sley_check_plan(plan: Plan) -> Iterator[Problem]:
    """Yields problems: `memory.selective` with compiled layers; shared host copies of states that move in every step."""
    if plan.activations.name == "memory.selective" and plan.model.config.compile:
        message = "`memory.selective` sees the operations of a layer one by one, which a compiled layer has not"
        hint = "`core.recompute` works with compiled layers"
        yield Problem(("activations", "use"), message, hint, "selective-compiled")
    for number, manager in enumerate(plan.offload):
        config = manager.config
        if isinstance(config, OffloadConfig) and config.is_shared and config.steps_in_buckets:
            message = "states that come and go in every step cannot be shared on the host: ranks must call alike for that"
            hint = 'use `when = "idle"`, or `dp.sharded`, which leaves each rank a part of the states'
            yield Problem(("offload", number, "shared"), message, hint, "shared-between-steps")


@hookimpl
def sley_records() -> list[Record]:
    def record(name: str, config: type[OffloadConfig], summary: str) -> OffloadManagerRecord:
        return OffloadManagerRecord(
            name=name, config=config, build="sley_memory.offload:Manager", summary=summary, parts=_MOVES, scope=_scope
        )

    return [
        MemoryPoolRecord(
            name="size_classes",
            config=SizeClassesConfig,
            build="sley_memory.arena:size_classes",
            summary="Keeps blocks by rounded size and lends views of them, to users of many sizes.",
        ),
        ActivationPolicyRecord(
            name="host",
            config=HostConfig,
            build="sley_memory.host:build",
            summary="What chosen layers save for their backward waits on the host.",
        ),
        ActivationPolicyRecord(
            name="selective",
            config=SelectiveConfig,
            build="sley_memory.selective:build",
            summary="Chosen layers run again in their backward, but for their attention.",
        ),
        record("weights", WeightsConfig, "Parameters and module buffers to the host and back, by call."),
        record("masters", MastersConfig, "fp32 masters to the host and back, by call."),
        record("optimizer_states", StatesConfig, "Optimizer states, by call or between all steps."),
        record("gradients", GradientsConfig, "Gradients freed and made anew, by call."),
        OffloadManagerRecord(
            name="host_optimizer",
            config=HostOptimizerConfig,
            build="sley_memory.host_optimizer:HostOptimizer",
            summary="Masters and optimizer states on the host, which steps them there.",
            parts=_MOVES,
            scope=_scope,
            steps_on_host=True,
        ),
        record("everything", EverythingConfig, "All of a run's memory, by call."),
    ]


@hookimpl(optionalhook=True)
def sley_estimate_hints() -> dict[str, Any]:
    in_steps = attrgetter("steps_in_buckets")
    by_call = ("weights", "masters", "optimizer_states", "gradients", "everything")
    return {
        **{f"memory.{name}": {"in_steps": in_steps} for name in by_call},
        "memory.optimizer_states": {"variants": [{"when": "between_steps"}], "in_steps": in_steps},
        "memory.host_optimizer": {"variants": [{}]},
        "memory.host": {"variants": [{}], "copies": True},
        "memory.selective": {"variants": [{}]},
    }


def _scope(config: OffloadConfig) -> Scope:
    """Returns what an update may depend on: for states that are stepped in buckets one matrix, else everything."""
    return "per_matrix" if config.steps_in_buckets else "global"

"""Declares the records of the plugin `memory`."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from sley_core.hookspecs import hookimpl
from sley_core.records import ActivationPolicyRecord, OffloadManagerRecord, Problem, Record, Scope
from sley_memory.config import (
    CopiedConfig,
    EverythingConfig,
    GradientsConfig,
    HostConfig,
    HostOptimizerConfig,
    MastersConfig,
    OffloadConfig,
    SelectiveConfig,
    StatesConfig,
    WeightsConfig,
)

if TYPE_CHECKING:
    from sley_core.api.plan import Plan


_MOVES = attrgetter("moves")


@hookimpl
def sley_check_plan(plan: Plan) -> Iterator[Problem]:
    """Yields a problem for what `memory.selective` cannot do in compiled layers, and for shared host copies of states that move
    in each step.
    """
    policy = plan.activations.config
    if isinstance(policy, SelectiveConfig) and plan.model.config.compile:
        hint = "use `core.recompute`, or remove `compile`"
        if policy.budget_bytes is not None:
            message = "a compiled layer keeps the outputs of its attention in every call, without a budget"
            yield Problem(("activations", "budget_bytes"), message, hint, "selective-compiled")
        if plan.parallel.sp > 1:
            message = "`memory.selective` needs layers without graph breaks, but the exchanges of `sp` are not compiled"
            yield Problem(("activations", "use"), message, hint, "selective-compiled")
    for number, manager in enumerate(plan.offload):
        config = manager.config
        if isinstance(config, CopiedConfig) and config.shared and config.steps_in_buckets:
            message = "optimizer states that move within each step cannot be shared between ranks"
            hint = 'set `when = "idle"`, or use `dp.sharded`, which splits the states between ranks'
            yield Problem(("offload", number, "shared"), message, hint, "shared-between-steps")


@hookimpl
def sley_records() -> list[Record]:
    def record(name: str, config: type[OffloadConfig]) -> OffloadManagerRecord:
        return OffloadManagerRecord(name=name, config=config, build="sley_memory.offload:Manager", parts=_MOVES, scope=_scope)

    return [
        ActivationPolicyRecord(name="host", config=HostConfig, build="sley_memory.host:build"),
        ActivationPolicyRecord(name="selective", config=SelectiveConfig, build="sley_memory.selective:build"),
        record("weights", WeightsConfig),
        record("masters", MastersConfig),
        record("optimizer_states", StatesConfig),
        record("gradients", GradientsConfig),
        OffloadManagerRecord(
            name="host_optimizer",
            config=HostOptimizerConfig,
            build="sley_memory.host_optimizer:HostOptimizer",
            parts=_MOVES,
            scope=_scope,
            steps_on_host=True,
        ),
        record("everything", EverythingConfig),
    ]


@hookimpl(optionalhook=True)
def sley_estimate_hints() -> dict[str, Any]:
    in_steps = attrgetter("steps_in_buckets")
    by_call = ("weights", "masters", "optimizer_states", "gradients", "everything")
    return {
        **{f"memory.{name}": {"in_steps": in_steps} for name in by_call},
        "memory.host": {"variants": [{}], "copies": True},
        "memory.selective": {"variants": [{}]},
    }


def _scope(config: OffloadConfig) -> Scope:
    """Returns the scope of an update: one matrix if states are updated in buckets, else all weights."""
    return "per_matrix" if config.steps_in_buckets else "global"

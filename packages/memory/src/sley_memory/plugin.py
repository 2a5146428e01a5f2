"""What the plugin `memory` has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sley_core.hookspecs import hookimpl
from sley_core.records import ActivationPolicyRecord, MemoryPoolRecord, Problem
from sley_memory.config import HostConfig, SelectiveConfig, SizeClassesConfig

if TYPE_CHECKING:
    from sley_core.api.plan import Plan


@hookimpl
def sley_check_plan(plan: Plan) -> Iterator[Problem]:
    if plan.activations.name == "memory.selective" and plan.model.config.compile:
        message = "`memory.selective` sees the operations of a layer one by one, which a compiled layer has not"
        hint = "`core.recompute` works with compiled layers"
        yield Problem(("activations", "use"), message, hint, "selective-compiled")


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
def sley_activation_policies() -> list[ActivationPolicyRecord]:
    return [
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
    ]

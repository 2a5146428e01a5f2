"""What the plugin `dp` has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sley_core.hookspecs import hookimpl
from sley_core.records import GradientHandlerRecord, Problem
from sley_dp.config import BucketedConfig, PowerSGDConfig

if TYPE_CHECKING:
    from sley_core.api.plan import Plan


@hookimpl
def sley_gradient_handlers() -> list[GradientHandlerRecord]:
    return [
        GradientHandlerRecord(
            name="bucketed",
            config=BucketedConfig,
            build="sley_dp.bucketed:Bucketed",
            role="reducer",
            tolerance_of=lambda config: config.tolerance,
            summary="Flat buckets, reduced while the backward runs.",
        ),
        GradientHandlerRecord(
            name="powersgd",
            config=PowerSGDConfig,
            build="sley_dp.powersgd:PowerSGD",
            role="reducer",
            exact=False,
            tolerance=0.75,
            summary="Flat buckets of low-rank approximations, with error feedback; not exact.",
        ),
    ]


@hookimpl
def sley_check_plan(plan: Plan) -> Iterable[Problem]:
    for number, handler in enumerate(plan.gradient_handlers):
        if isinstance(handler.config, PowerSGDConfig) and handler.config.start_step > plan.run.steps:
            message = f"the run has {plan.run.steps} steps, so nothing would be compressed"
            hint = f"use start_step = {plan.run.steps} or less, or `dp.bucketed`"
            yield Problem(("gradient_handlers", number, "start_step"), message, hint, "beyond-the-run")
        if isinstance(handler.config, PowerSGDConfig) and plan.precision.compute == "fp16":
            message = "`dp.powersgd` gives later what it left out, and fp16's scale and skipped steps would spoil that"
            hint = 'use compute = "bf16", or `dp.bucketed`'
            yield Problem(("gradient_handlers", number, "use"), message, hint, "handler-precision")

"""Defines the table, the record and the plan check of `powersgd.reducer`. Imports no torch, since plan checks import it."""

from collections.abc import Iterable

from pydantic import PositiveFloat, PositiveInt

from sley_core.api.plan import Plan, Table
from sley_core.hookspecs import hookimpl
from sley_core.records import GradientHandlerRecord, Problem


class PowerSGDConfig(Table):
    """Sums low-rank approximations of gradients; the error of a step is added to the next step's gradients."""

    bucket_mb: PositiveFloat = 25.0
    """The size in MiB of the gradients in a bucket, whose factors are sent in one collective."""

    rank: PositiveInt = 4
    """The number of columns of the two factors of a matrix. More columns are more accurate and need more bytes."""

    start_step: PositiveInt = 1
    """The first step to compress, counted from 1 as in `metrics.jsonl`; earlier steps compute exact sums."""

    error_feedback: bool = True
    """Whether the error of a step is added to the next step's gradients, which needs memory for a copy of the gradients."""


@hookimpl
def sley_gradient_handlers() -> Iterable[GradientHandlerRecord]:
    return [
        GradientHandlerRecord(
            name="reducer", config=PowerSGDConfig, build="sley_powersgd.handler:PowerSGD", role="reducer", tolerance=0.97
        )
    ]


@hookimpl
def sley_check_plan(plan: Plan) -> Iterable[Problem]:
    """Yields a problem for a compression that never starts, and for unsupported precisions."""
    for number, handler in enumerate(plan.gradient_handlers):
        if not isinstance(handler.config, PowerSGDConfig):
            continue
        path = ("gradient_handlers", number)
        if handler.config.start_step > plan.run.steps:
            message = f"the run has {plan.run.steps} steps, so nothing would be compressed"
            hint = f"use start_step = {plan.run.steps} or less, or `core.each`"
            yield Problem((*path, "start_step"), message, hint, "beyond-the-run")
        if plan.precision.compute == "fp16":
            message = "`powersgd.reducer` adds errors of earlier steps, whose fp16 loss scale may differ"
            yield Problem((*path, "use"), message, 'use compute = "bf16", or `core.each`', "handler-precision")
        if plan.precision.gradients == "bf16":
            message = "`powersgd.reducer` factorises gradients, which torch cannot do in bf16"
            yield Problem((*path, "use"), message, "remove `[precision] gradients`", "handler-precision")

"""Defines the table, the record and the plan check of `topk.reducer`. Imports no torch, since plan checks import it."""

from collections.abc import Iterable
from math import sqrt
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat

from sley_core.api.plan import Plan, Table
from sley_core.hookspecs import hookimpl
from sley_core.records import GradientHandlerRecord, Problem


class TopKConfig(Table):
    """`topk.reducer`: sends the largest elements of each gradient, and the other elements in later steps."""

    ratio: Annotated[PositiveFloat, Field(le=1.0)] = 0.01
    """The share of a gradient's elements that a rank sends in a step, at least one element. With 1.0 sums are exact."""

    min_numel: NonNegativeInt = 1024
    """Smaller gradients have exact sums: norms and biases are sensitive and small."""


def compute_tolerance(config: TopKConfig) -> float:
    """Returns the maximum relative norm of omitted elements: the largest elements have at least their share of the square."""
    return sqrt(1.0 - config.ratio)


@hookimpl
def sley_gradient_handlers() -> Iterable[GradientHandlerRecord]:
    return [
        GradientHandlerRecord(
            name="reducer", config=TopKConfig, build="sley_topk.handler:TopK", role="reducer", tolerance=compute_tolerance
        )
    ]


@hookimpl
def sley_check_plan(plan: Plan) -> Iterable[Problem]:
    for number, handler in enumerate(plan.gradient_handlers):
        if isinstance(handler.config, TopKConfig) and plan.precision.compute == "fp16":
            message = "`topk.reducer` sends elements in later steps, when the loss scale of fp16 may differ"
            hint = 'use compute = "bf16", or an exact reducer'
            yield Problem(("gradient_handlers", number, "use"), message, hint, "handler-precision")

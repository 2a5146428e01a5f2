"""Defines the tables, the records and the plan check of this package. Imports no torch, since plan checks import it."""

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from sley_core.api.plan import Plan, Table, Topology
from sley_core.hookspecs import hookimpl
from sley_core.records import GradientHandlerRecord, Problem


class NoiseConfig(Table):
    """`watch.noise`: adds `watch/noise_scale`, the batch size above which larger batches have diminishing returns."""

    smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """The weight of earlier steps in the two moving averages. 0 uses only the current step, which is very noisy."""


class LayersConfig(Table):
    """`watch.layers`: adds the norms of the gradient and weights of each layer."""

    weights: bool = True
    """Whether to add the norms of weights. The norms of gradients are always added."""


@hookimpl
def sley_gradient_handlers() -> Iterable[GradientHandlerRecord]:
    return [
        GradientHandlerRecord(
            name="noise", config=NoiseConfig, build="sley_watch.noise:Noise", role="observer", before=("reducer",)
        ),
        GradientHandlerRecord(name="layers", config=LayersConfig, build="sley_watch.layers:Layers", role="observer"),
    ]


@hookimpl
def sley_check_plan(plan: Plan, topology: Topology) -> Iterable[Problem]:
    for number, handler in enumerate(plan.gradient_handlers):
        if not isinstance(handler.config, NoiseConfig):
            continue
        path = ("gradient_handlers", number, "use")
        if topology.dp == 1 or topology.pp * topology.sp * topology.wp > 1:
            message = (
                "`watch.noise` compares gradients of replicas with their sum, so it needs dp = 2 or more, and no other axis"
            )
            yield Problem(path, message, "remove it, or measure the noise in a run with only `dp`", "watch-layout")
        if plan.precision.compute == "fp16":
            message = (
                "`watch.noise` reads gradients before they are unscaled, so its numbers would include the loss scale of fp16"
            )
            yield Problem(path, message, 'use compute = "bf16"', "handler-precision")

"""The plugin `wave`: all parts that a pipeline needs. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pydantic import PositiveInt

from sley_core.api.plan import Table
from sley_core.errors import PlanError
from sley_core.hookspecs import hookimpl
from sley_core.protocols import GradientHandler
from sley_core.records import GradientHandlerRecord, PartitionerRecord, Record, ScheduleRecord, StageLinkRecord

if TYPE_CHECKING:
    from sley_core.api.parts import Parts, StepState


class HanayoConfig(Table):
    """Samples go up all stages and down again, in waves."""

    waves: PositiveInt = 1
    """The number of waves. Each adds two parts of the model per stage."""


class NoKeys(Table):
    """A table without keys."""


@hookimpl
def sley_records() -> list[Record]:
    parts = {"link": "wave.link", "partition": "wave.even", "ties": "wave.ties"}
    return [
        ScheduleRecord(name="hanayo", config=HanayoConfig, build="sley_wave.hanayo:build", **parts),
        StageLinkRecord(name="link", config=NoKeys, build="sley_wave.link:Link"),
        PartitionerRecord(name="even", config=NoKeys, build="sley_wave.plugin:build_partitioner"),
    ]


@hookimpl
def sley_gradient_handlers() -> list[GradientHandlerRecord]:
    build = "sley_wave.plugin:Ties"
    return [GradientHandlerRecord(name="ties", config=NoKeys, build=build, role="tie", after=("reducer",))]


def build_partitioner(config: NoKeys) -> Callable[[Sequence[float], int], tuple[int, ...]]:
    return split_evenly


def split_evenly(costs: Sequence[float], num_positions: int) -> tuple[int, ...]:
    """Returns the bounds of parts with equal numbers of layers, or one more."""
    if len(costs) < num_positions:
        message = f"{len(costs)} layers cannot be split into {num_positions} parts"
        raise PlanError("partition-empty", message, path=("parallel", "pp"))
    return tuple(len(costs) * position // num_positions for position in range(num_positions + 1))


class Ties(GradientHandler):
    """Sums the gradients of weights that several stages hold, so that the copies stay equal."""

    def __init__(self, config: NoKeys) -> None:
        pass

    def attach(self, parts: Parts) -> None:
        self._parts = parts
        self._tied_names = sorted(param.name for param in parts.registry if param.tie_axis is not None)

    def finish_step(self, step: StepState) -> None:
        for name in self._tied_names:
            param = self._parts.registry[name]
            if param in self._parts.store and param.tie_axis is not None:
                # The tie's own group. Its ranks iterate the ties by name.
                group = self._parts.groups[param.tie_axis]
                group.all_reduce(self._parts.store.gradient(param), label=f"the tied gradient of {name}").wait()

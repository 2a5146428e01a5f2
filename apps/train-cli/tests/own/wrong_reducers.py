"""Gradient handlers with one bug each; plans name them `wrong.NAME`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sley_core.hookspecs import hookimpl
from sley_core.protocols import GradientHandler
from sley_core.records import GradientHandlerRecord, Role
from sley_core.table import Table
from sley_pp.plugin import SharedModulesConfig
from sley_pp.shared import SharedModules

if TYPE_CHECKING:
    from sley_core.api.parts import Param, Parts, StepState


class NoKeys(Table):
    """No key."""


class Right(GradientHandler):
    """Sums each gradient when it is ready."""

    def __init__(self, config: NoKeys) -> None:
        self.num_steps = 0

    def attach(self, parts: Parts) -> None:
        self.store, self.groups = parts.store, parts.groups

    def begin_step(self, step: StepState) -> None:
        self.num_steps += 1

    def gradient_ready(self, param: Param, step: StepState) -> None:
        self.sum(param, self.store.gradient(param))

    def sum(self, param: Param, gradient: Any) -> None:
        # The parameter's reduce group; the store reports parameters in one order on all of its ranks.
        self.groups[param.reduce_group].all_reduce(gradient, label=param.name).wait()


class Mean(Right):
    """Averages over ranks, as other programs do."""

    def sum(self, param: Param, gradient: Any) -> None:
        super().sum(param, gradient)
        gradient /= self.groups[param.reduce_group].size


class Late(Right):
    """Adds the gradient of the first step to one gradient of the second step."""

    def sum(self, param: Param, gradient: Any) -> None:
        super().sum(param, gradient)
        if param.name == "blocks.0.feed_forward.up.weight":
            if self.num_steps == 2:
                gradient += self.kept
            self.kept = gradient.clone()


class Coarse(Right):
    """Rounds sums, within the tolerance of its record."""

    def sum(self, param: Param, gradient: Any) -> None:
        super().sum(param, gradient)
        gradient *= 1 + 2.0**-9


class Twice(SharedModules):
    """Sums the gradients of shared weights twice."""

    def __init__(self, config: NoKeys) -> None:
        super().__init__(SharedModulesConfig())

    def finish_step(self, step: StepState) -> None:
        super().finish_step(step)
        super().finish_step(step)


@hookimpl
def sley_gradient_handlers() -> Iterable[GradientHandlerRecord]:
    def record(name: str, role: Role = "reducer", **more: Any) -> GradientHandlerRecord:
        return GradientHandlerRecord(name=name.lower(), config=NoKeys, build=f"wrong_reducers:{name}", role=role, **more)

    return [record("Mean"), record("Late"), record("Coarse", tolerance=2.0**-8), record("Twice", "tie")]

"""Handlers that are wrong in one way each, and one that is right; a plan names them as `wrong.NAME`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sley_core.hookspecs import hookimpl
from sley_core.protocols import GradientHandler
from sley_core.records import GradientHandlerRecord, Role
from sley_core.table import Table

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
        self.names = [param.name for param in parts.registry.trainable]

    def begin_step(self, step: StepState) -> None:
        self.num_steps += 1

    def gradient_ready(self, param: Param, step: StepState) -> None:
        self.sum(param, self.store.gradient(param))

    def sum(self, param: Param, gradient: Any) -> None:
        # The parameter's reduce group; the store reports parameters in one order on all of its ranks.
        self.groups[param.reduce_group].all_reduce(gradient, label=param.name).wait()


class Mean(Right):
    """Averages over ranks, as is the habit elsewhere."""

    def sum(self, param: Param, gradient: Any) -> None:
        super().sum(param, gradient)
        gradient /= self.groups[param.reduce_group].size


class Tail(Right):
    """Leaves out the last elements of one matrix."""

    def sum(self, param: Param, gradient: Any) -> None:
        kept = gradient[-1].clone()
        super().sum(param, gradient)
        if param.name == "blocks.1.attention.key.weight":
            gradient[-1] = kept


class Late(Right):
    """Keeps what the first step has left, and adds it to one gradient in the second."""

    def sum(self, param: Param, gradient: Any) -> None:
        super().sum(param, gradient)
        if param.name == "blocks.0.feed_forward.up.weight":
            if self.num_steps == 2:
                gradient += self.kept
            self.kept = gradient.clone()


class FirstRank(Right):
    """Is right on rank 0 alone."""

    def sum(self, param: Param, gradient: Any) -> None:
        super().sum(param, gradient)
        if self.groups["stage"].coord and param.name == self.names[-1]:
            gradient *= 3.0


class Coarse(Right):
    """Rounds sums, as its record says."""

    def sum(self, param: Param, gradient: Any) -> None:
        super().sum(param, gradient)
        gradient *= 1 + 2.0**-9


class Twice(GradientHandler):
    """Sums shared weights as it should, and once more."""

    def __init__(self, config: NoKeys) -> None:
        from sley_pp.plugin import SharedModulesConfig
        from sley_pp.shared import SharedModules

        self.ties = SharedModules(SharedModulesConfig())

    def attach(self, parts: Parts) -> None:
        self.ties.attach(parts)

    def begin_step(self, step: StepState) -> None:
        self.ties.begin_step(step)

    def finish_step(self, step: StepState) -> None:
        self.ties.finish_step(step)
        self.ties.finish_step(step)


@hookimpl
def sley_gradient_handlers() -> Iterable[GradientHandlerRecord]:
    def record(name: str, role: Role = "reducer", **more: Any) -> GradientHandlerRecord:
        return GradientHandlerRecord(name=name.lower(), config=NoKeys, build=f"wrong_reducers:{name}", role=role, **more)

    wrong = [record(one.__name__) for one in (Right, Mean, Tail, Late, FirstRank)]
    return [*wrong, record("Coarse", tolerance=2.0**-8), record("Twice", "tie")]

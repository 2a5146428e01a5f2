"""Gradient handlers of a few lines; one of them is broken."""

from __future__ import annotations

from sley_core.api.comm import Pending
from sley_core.api.parts import GradientBuffer, Layout, Param, Parts, StepState
from sley_core.protocols import GradientHandler
from sley_core.table import Table


class Early(GradientHandler):
    """Sees what this rank has before the reducer sums it, as a gradient noise scale must."""

    def __init__(self, config: Table) -> None:
        self.norms: list[float] = []

    def attach(self, parts: Parts) -> None:
        self.store = parts.store

    def gradient_ready(self, param: Param, step: StepState) -> None:
        self.norms.append(float(self.store.gradient(param).norm()))


class Late(GradientHandler):
    """Notes what is ready, and sums it when the step is over."""

    def __init__(self, config: Table) -> None:
        self._ready: list[Param] = []

    def attach(self, parts: Parts) -> None:
        self._parts = parts

    def begin_step(self, step: StepState) -> None:
        self._ready.clear()

    def gradient_ready(self, param: Param, step: StepState) -> None:
        self._ready.append(param)

    def finish_step(self, step: StepState) -> None:
        for param in self._ready:
            # The parameter's reduce group, in the store's order, which is the same on all of its ranks.
            group = self._parts.groups[param.reduce_group]
            group.all_reduce(self._parts.store.gradient(param), label=param.name).wait()
        self._ready.clear()


class Hoards(Late):
    """Keeps what a failed step had noted, and sums it twice in the next one."""

    def begin_step(self, step: StepState) -> None:
        pass


class Halves(GradientHandler):
    """Sums each half of the gradients of a reduce group in one exchange, as soon as the last of them is there."""

    def __init__(self, config: Table) -> None:
        self._pending: list[Pending] = []

    def attach(self, parts: Parts) -> None:
        self._store, self._groups = parts.store, parts.groups
        parts.store.lay_out(halves)  # from now on, also after a parameter was frozen

    def begin_step(self, step: StepState) -> None:
        self._wait()  # for what a failed step has left
        self._missing: dict[GradientBuffer, set[Param]] = {one: set(one.params) for one in self._store.buffers}

    def gradient_ready(self, param: Param, step: StepState) -> None:
        buffer = next(one for one, missing in self._missing.items() if param in missing)
        self._missing[buffer].remove(param)
        if not self._missing[buffer]:
            # The buffer's reduce group; its ranks are told of the same parameters in one order.
            group = self._groups[buffer.reduce_group]
            self._pending.append(group.all_reduce(buffer.data, label=f"the half of {param.name}"))

    def finish_step(self, step: StepState) -> None:
        self._wait()

    def _wait(self) -> None:
        for pending in self._pending:
            pending.wait()
        self._pending.clear()


def halves(params: list[Param]) -> Layout:
    """The planner: from the trainable parameters, in reverse order of use, to the buffers that are wanted."""
    families: dict[object, list[Param]] = {}
    for param in params:
        families.setdefault(param.family, []).append(param)
    cut = [part for one in families.values() for part in (one[: len(one) // 2], one[len(one) // 2 :])]
    return Layout(buffers=cut, order=params)

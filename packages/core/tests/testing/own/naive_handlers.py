"""Gradient handlers of a few lines, which leave the store's layout as it is; one of them is broken."""

from __future__ import annotations

from sley_core.api.comm import all_reduce
from sley_core.api.parts import Entry, Parts, StepState
from sley_core.protocols import GradientHandler
from sley_core.table import Table


class Early(GradientHandler):
    """Sees what this rank has before the reducer sums it, as a gradient noise scale must."""

    def __init__(self, config: Table) -> None:
        self.norms: list[float] = []

    def attach(self, parts: Parts) -> None:
        self.store = parts.store

    def gradient_ready(self, entry: Entry, step: StepState) -> None:
        self.norms.append(float(self.store.gradient(entry).norm()))


class Late(GradientHandler):
    """Notes what is ready, and sums it when the step is over."""

    def __init__(self, config: Table) -> None:
        self._ready: list[Entry] = []

    def attach(self, parts: Parts) -> None:
        self._parts = parts

    def begin_step(self, step: StepState) -> None:
        self._ready.clear()

    def gradient_ready(self, entry: Entry, step: StepState) -> None:
        self._ready.append(entry)

    def finish_step(self, step: StepState) -> None:
        for entry in self._ready:
            # The entry's reduce group, in the store's order, which is the same on all of its ranks.
            group = self._parts.groups[entry.reduce_group]
            all_reduce(self._parts.store.gradient(entry), group, what=entry.name).wait()
        self._ready.clear()


class Hoards(Late):
    """Keeps what a failed step had noted, and sums it twice in the next one."""

    def begin_step(self, step: StepState) -> None:
        pass

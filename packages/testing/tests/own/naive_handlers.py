"""Short reducers: two correct ones, and `Hoards` with a bug."""

from sley_core.api.comm import Work
from sley_core.api.parts import GradientBuffer, Layout, Param, Parts, StepState
from sley_core.protocols import GradientHandler
from sley_core.table import Table


class Late(GradientHandler):
    """Sums all ready gradients at the end of the step."""

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
    """Keeps the parameters of a failed step and sums their gradients twice in the next step."""

    def begin_step(self, step: StepState) -> None:
        pass


class Halves(GradientHandler):
    """Sums each half of a reduce group's gradients in one exchange, when the last of them is ready."""

    def __init__(self, config: Table) -> None:
        self._pending: list[Work] = []

    def attach(self, parts: Parts) -> None:
        self._store, self._groups = parts.store, parts.groups
        parts.store.lay_out(halves)

    def begin_step(self, step: StepState) -> None:
        self._wait()  # for the exchanges of a failed step
        self._missing: dict[GradientBuffer, set[Param]] = {buffer: set(buffer.params) for buffer in self._store.buffers}

    def gradient_ready(self, param: Param, step: StepState) -> None:
        buffer = next(buffer for buffer, missing in self._missing.items() if param in missing)
        self._missing[buffer].remove(param)
        if not self._missing[buffer]:
            # The ranks of the reduce group get the same parameters in the same order.
            group = self._groups[buffer.reduce_group]
            self._pending.append(group.all_reduce(buffer.data, label=f"the half of {param.name}"))

    def finish_step(self, step: StepState) -> None:
        self._wait()

    def _wait(self) -> None:
        for pending in self._pending:
            pending.wait()
        self._pending.clear()


def halves(params: list[Param]) -> Layout:
    """Plans two buffers per family from the trainable parameters, which are in reverse order of use."""
    families: dict[object, list[Param]] = {}
    for param in params:
        families.setdefault(param.family, []).append(param)
    buffers = [half for family in families.values() for half in (family[: len(family) // 2], family[len(family) // 2 :])]
    return Layout(buffers=buffers, order=params)

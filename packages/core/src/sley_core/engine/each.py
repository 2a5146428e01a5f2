"""`core.each`: one all-reduce per parameter. Slow, plain, and the oracle of every faster reducer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sley_core.comm.collectives import Pending, all_reduce
from sley_core.protocols import GradientHandler

if TYPE_CHECKING:
    from sley_core.engine.book import Entry
    from sley_core.engine.config import EachConfig
    from sley_core.engine.parts import Parts
    from sley_core.engine.step_state import StepState


class Each(GradientHandler):
    """Sums each entry over its reduce group, in the store's order; entries of a group of one are left alone."""

    def __init__(self, config: EachConfig) -> None:
        self.config = config
        self._pending: list[Pending] = []

    def attach(self, parts: Parts) -> None:
        self._store = parts.store
        self._groups = parts.groups
        self._alone = frozenset(axis for axis, group in parts.groups.items() if group.size == 1)

    def begin_step(self, step: StepState) -> None:
        # Reductions of a failed step may still be in flight, and write into the slots: wait for them first.
        self.finish_step(step)

    def gradient_ready(self, entry: Entry, step: StepState) -> None:
        if entry.reduce_group in self._alone:
            return
        group = self._groups[entry.reduce_group]
        # The entry's reduce group; the store reports entries in one order on all of its ranks.
        self._pending.append(all_reduce(self._store.gradient(entry), group, what=entry.name))

    def finish_step(self, step: StepState) -> None:
        for pending in self._pending:
            pending.wait()
        self._pending = []

"""Caches values that a factory reads while it runs, so that the next read does not replay all steps before it.

Without it, `for i in range(1000): weight[i].mul_(x); weight.norm().item()` would run 1000 * 1000 / 2 steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sley_core.model.memory import ReplayMemory
from sley_core.model.steps import Blank, Cell, Given, Ref, Step, needed

KEPT_BYTES = 2**25
"""The most bytes that are kept, apart from the largest value, which a replay needs anyway."""


@dataclass(eq=False, kw_only=True)
class Kept(Step):
    """Holds the value of a cell at the end of a replay, which replaces all its earlier steps."""

    cell: Cell
    storage: torch.UntypedStorage

    def run(self, memory: ReplayMemory) -> None:
        """Shares the kept memory with the replay."""
        memory.share(self.cell, self.storage)


class Keeper:
    """Replays values and keeps the results, the latest `limit` bytes."""

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self._limit = limit
        self._kept: dict[Cell, Kept] = {}

    @torch.no_grad()
    def value(self, ref: Ref) -> Tensor:
        """Returns the current value of `ref` as `replay([ref])` does, from kept values where possible."""
        steps = needed([ref], from_kept=True)
        memory = ReplayMemory()
        for step in sorted(steps, key=lambda step: step.number):
            step.run(memory)
        for cell, storage in list(memory.storages()):
            last = cell.steps[-1]
            if last in steps and not isinstance(last, Given | Blank):  # no step after those that were run
                self._keep(cell, storage)
                memory.share(cell, storage)
        self._drop()
        return memory.value(ref)

    def close(self) -> None:
        """Frees all kept values and keeps no more."""
        self._limit = -1
        self._drop()

    def _keep(self, cell: Cell, storage: torch.UntypedStorage) -> None:
        self._kept.pop(cell, None)
        self._kept[cell] = kept = Kept(cell=cell, storage=storage, overwrites=[cell])
        cell.kept = kept

    def _drop(self) -> None:
        """Frees the oldest values until `limit` plus the largest value suffices."""
        sizes = {cell: cell.nbytes for cell in self._kept}
        allowed = self._limit + max(sizes.values(), default=0) if self._limit >= 0 else -1
        total = sum(sizes.values())
        for cell in list(self._kept):
            if total <= allowed:
                return
            total -= sizes[cell]
            del self._kept[cell]
            cell.kept = None

"""Bounds layouts by the critical paths of others: once a few with the same lists were simulated, most need not be.

simulated   1F1B, 64 micro-batches ──> its path ──┐
                                                  ├──> longest of these paths, with the costs of the layout ──> bound
simulated   the same lists, other costs ──> path ─┘
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sley_estimate.seconds.critical_path import critical_path

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sley_estimate.search.quick_step import QuickStep

NEAR = 1.15
"""Another path is looked for where a step takes more than this many times what known ones say."""


class KnownPaths:
    """Holds the critical paths of lists, by `few_key`; one object for a search."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, int], NDArray[np.int64]] = {}

    def least_s(self, step: QuickStep) -> float:
        """Returns seconds that `step` does not undercut, by the known paths of its lists; 0 if none are known."""
        known = self._of.get(step.few_key)
        return 0.0 if known is None else float((known @ step.path_costs).max()) + step.beside_s

    def begin(self, step: QuickStep) -> None:
        """Adds the critical path of `step` if none of its lists are known."""
        if step.few_key not in self._of:
            self._of[step.few_key] = self._path(step)[np.newaxis]

    def learn(self, step: QuickStep, seconds: float) -> None:
        """Adds the critical path of `step`, which takes `seconds`, unless known ones say nearly as much of it."""
        if seconds > NEAR * self.least_s(step):
            known, path = self._of[step.few_key], self._path(step)
            if not (known == path).all(axis=1).any():
                self._of[step.few_key] = np.vstack([known, path])

    def _path(self, step: QuickStep) -> NDArray[np.int64]:
        return critical_path(step.cut.outline(step.few), step.path_costs)

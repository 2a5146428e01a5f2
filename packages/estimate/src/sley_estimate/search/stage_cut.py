"""Tells how a schedule cuts the model: which layers are one part, which stage holds it, and what the stages' lists are.

layers      0 1 2 3 4 5 6 7      values of layers are summed
positions   0   1   2   3        by position,
stages      0   1   1   0        and by stage: schedules that deal alike have the same `ModelParts`
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sley_core.errors import SleyError
from sley_estimate.search.held import Held, most_held
from sley_estimate.seconds.outline import Outline

if TYPE_CHECKING:
    from sley_core.actions.action import Placement
    from sley_core.engine.stage import Lists

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ModelParts:
    """Which layers are at which position, and on which stage. bounds: of the model's layers, from position to position."""

    bounds: tuple[int, ...]
    placement: Placement

    @cached_property
    def starts(self) -> NDArray[np.intp]:
        """Returns the number of the first layer of each position."""
        return np.array(self.bounds[:-1])

    @cached_property
    def places(self) -> NDArray[np.intp]:
        """Returns the position of each chunk of each stage: [chunk, stage]."""
        stages, chunks = range(self.placement.stages), range(self.placement.chunks)
        return np.array([[self.placement.position(stage, chunk) for stage in stages] for chunk in chunks])

    @cached_property
    def firsts(self) -> NDArray[np.intp]:
        """Returns the first position of each stage."""
        return np.asarray(self.places.min(axis=0))

    def of_stage(self, stage: int) -> list[tuple[int, int]]:
        """Returns, for each chunk of a stage, the number of its first layer and of the one behind its last."""
        bounds = list(pairwise(self.bounds))
        return [bounds[self.placement.position(stage, chunk)] for chunk in range(self.placement.chunks)]

    def stage_of(self, layer: int) -> int:
        """Returns the stage that holds a layer, by its number in the model."""
        return self.placement.route[bisect_right(self.bounds, layer) - 1]

    def by_position(self, values: Sequence[float] | np.ndarray) -> Floats:
        """Returns, for values of each layer, [..., layers], their sums over each position: [..., positions]."""
        return np.add.reduceat(np.asarray(values, dtype=np.float64), self.starts, axis=-1)

    def by_stage(self, values: Sequence[float] | np.ndarray) -> Floats:
        """Returns, for values of each layer, [..., layers], their sums over each stage, [..., stages], added position by
        position.
        """
        return self.sum_of_stages(self.by_position(values))

    def sum_of_stages(self, values: Floats) -> Floats:
        """Returns, for values of each position, [..., positions], their sums over each stage: [..., stages]."""
        dealt = values[..., self.places]
        total: Floats = dealt[..., 0, :]
        for chunk in range(1, self.placement.chunks):
            total = total + dealt[..., chunk, :]
        return total


@dataclass(frozen=True, eq=False)
class StageCut:
    """A schedule's lists, and its parts."""

    lists: Lists
    parts: ModelParts
    _outlines: dict[int, Outline] = field(default_factory=dict, repr=False)
    _held: dict[int, Held] = field(default_factory=dict, repr=False)

    @property
    def placement(self) -> Placement:
        return self.parts.placement

    def few(self, micros: int) -> int:
        """Returns of how many micro-batches lists tell what stages hold in a step of `micros`: two per stage, if shorter lists
        tell it and there are as many.
        """
        some = 2 * self.placement.stages
        return some if some < micros and self._short_ones_tell else micros

    @cached_property
    def _short_ones_tell(self) -> bool:
        """Returns whether stages hold as much in steps of two as in steps of three micro-batches per stage. A schedule may hold
        all that there are, or have no such steps, as one that is written in a file.
        """
        stages = self.placement.stages
        try:
            some, more = self.lists.of_all_stages(2 * stages), self.lists.computing(3 * stages)
        except SleyError:
            return False
        return list(map(most_held, some)) == list(map(most_held, more))

    def outline(self, micros: int) -> Outline:
        """Returns the lists of a step of `micros` micro-batches as numbers, which the simulation takes; made once for each
        `micros`.
        """
        if micros not in self._outlines:
            self._outlines[micros] = Outline(self.lists.of_all_stages(micros), self.placement)
        return self._outlines[micros]

    def held(self, micros: int) -> Held:
        """Returns what counts the bytes that stages hold in a step of `micros` micro-batches; made once for each `micros`."""
        if micros not in self._held:
            self._held[micros] = Held(self.lists.of_all_stages(micros), self.placement)
        return self._held[micros]

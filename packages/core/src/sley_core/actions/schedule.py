"""What the `build(config)` of a schedule record returns: lists for any number of stages, and their placement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sley_core.actions.action import Action
from sley_core.actions.placement import Placement, Placing, loop, wrong_placement

Generator = Callable[[int, int, int], list[list[Action]]]
"""`(stages, chunks, micros) -> one list per stage`: pure, compute actions only. Raises PlanError outside its domain."""


@dataclass(frozen=True)
class Schedule:
    """A generator with the choices of its plan's table: how many chunks a stage has, and how they are placed.

    place: makes the placement for any number of stages, as `loop` and `v` do.
    """

    generate: Generator
    chunks: int = 1
    place: Placing = loop

    def placement(self, stages: int) -> Placement:
        """Returns the placement for `stages`. Raises PlanError "placement-wrong" if a stage would not hold `chunks`
        positions.
        """
        found = self.place(stages, self.chunks)
        if (found.stages, found.chunks) != (stages, self.chunks):
            has = f"{found.chunks} parts of the model on each of {found.stages} stages"
            raise wrong_placement(f"has {has}, not {self.chunks} on each of {stages}")
        return found

    def lists(self, stages: int, micros: int) -> list[list[Action]]:
        """Returns every stage's compute actions in a training step; `lower` takes them with `placement(stages)`."""
        return self.generate(stages, self.chunks, micros)

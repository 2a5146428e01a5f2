"""What the `build(config)` of a schedule record returns: lists for any number of stages, and their placement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sley_core.actions.action import Action
from sley_core.actions.placement import Placement, Placing, loop, wrong_placement
from sley_core.errors import PlanError

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
        """Returns the placement for `stages`; PlanError "placement-wrong" if a stage does not hold `chunks` positions."""
        found: Any = self.place(stages, self.chunks)
        if not isinstance(found, Placement):
            raise wrong_placement(f"is a `{type(found).__name__}`, not a `Placement`")
        if (found.stages, found.chunks) != (stages, self.chunks):
            has = f"{found.chunks} parts of the model on each of {found.stages} stages"
            raise wrong_placement(f"has {has}, not {self.chunks} on each of {stages}")
        return found

    def lists(self, stages: int, micros: int) -> list[list[Action]]:
        """Returns every stage's compute actions in a training step; `lower` takes them with `placement(stages)`.

        Raises PlanError "schedule-wrong" for what is not a sequence of actions for each stage.
        """
        made: Any = self.generate(stages, self.chunks, micros)
        if not isinstance(made, Sequence):
            raise _wrong(made, "a list for each stage")
        for steps in made:
            if not isinstance(steps, Sequence):
                raise _wrong(steps, "a list for a stage")
            for step in steps:
                if not isinstance(step, Action):
                    raise _wrong(step, "an action in a stage's list")
        return [list(steps) for steps in made]


def _wrong(found: object, due: str) -> PlanError:
    message = f"the schedule's generator returns a `{type(found).__name__}` instead of {due}"
    return PlanError("schedule-wrong", message, path=("pipeline", "use"), hint="it returns `list[list[Action]]`")

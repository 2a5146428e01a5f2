"""A schedule in waves: samples go up all stages and down again, and once more for each further wave.

stage     0   1   2                    a wave of three stages, 1F1B in which a stage takes what is furthest on
chunk 0   0 > 1 > 2
chunk 1   5 < 4 < 3
"""

from __future__ import annotations

from sley_core.api.actions import Action, Delivery, Kind, Placement, Schedule
from sley_core.errors import PlanError
from sley_wave.config import HanayoConfig


def build(config: HanayoConfig) -> Schedule:
    return Schedule(hanayo, chunks=2 * config.waves, place=wave)


def wave(stages: int, chunks: int) -> Placement:
    """Up, down, up, ...: neighbours are on stages beside each other or, where a wave turns, on the same one."""
    up, down = tuple(range(stages)), tuple(reversed(range(stages)))
    return Placement(tuple(stage for chunk in range(chunks) for stage in (down if chunk % 2 else up)))


def hanayo(stages: int, chunks: int, micros: int) -> list[list[Action]]:
    """An even number of chunks per stage; any number of microbatches, as many as stages of them on their way at a time."""
    if chunks % 2:
        message = f"`wave.hanayo` needs an even number of chunks, not {chunks}"
        raise PlanError("schedule-chunks", message, path=("pipeline", "waves"))
    walk = _Walk(wave(stages, chunks), micros)
    while any(walk.todo):
        walk.tick()
    return walk.done


class _Walk:
    """All stages in step, an action per tick and stage: `todo` by what is wanted first, and `done`."""

    def __init__(self, placement: Placement, micros: int) -> None:
        self.placement = placement
        self.done: list[list[Action]] = [[] for _ in range(placement.stages)]
        self.todo = [
            [
                Action(kind, chunk, micro)
                for kind in (Kind.BACKWARD, Kind.FORWARD)
                for micro in range(micros)
                for chunk in reversed(range(placement.chunks))
            ]
            for _ in range(placement.stages)
        ]
        self._made: set[Delivery] = set()
        self._begun = self._ended = 0

    def tick(self) -> None:
        """Each stage does the first action that it can."""
        made: set[Delivery] = set()
        for stage, todo in enumerate(self.todo):
            action = next((action for action in todo if self._can(action, stage)), None)
            if action is None:
                continue
            todo.remove(action)
            self.done[stage].append(action)
            position = self.placement.position(stage, action.chunk)
            if position == 0:
                self._begun += action.kind is Kind.FORWARD
                self._ended += action.kind is Kind.BACKWARD
            delivery = self.placement.output_of(action, position)
            made |= set() if delivery is None else {delivery}
        self._made |= made

    def _can(self, action: Action, stage: int) -> bool:
        position = self.placement.position(stage, action.chunk)
        delivery = self.placement.input_of(action, position)
        if delivery is not None:
            return delivery in self._made
        if action.kind is Kind.BACKWARD:  # where the model ends
            return Action(Kind.FORWARD, action.chunk, action.micro) in self.done[stage]
        return self._begun - self._ended < self.placement.stages

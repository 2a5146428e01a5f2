"""Which part of the model each stage holds, and who its neighbours are: integers only.

The layers of a model are cut into `stages x chunks` positions, in the order in which a sample passes them. A stage holds
`chunks` of them. A placement is the route of a sample: of each position, the stage that holds it. Two ways to deal them are
here, any other is a function of a plugin's (`Placing`):

    loop, 4 stages, 2 chunks               v, 4 stages

    stage     0   1   2   3                stage     0   1   2   3
    chunk 0   0 > 1 > 2 > 3 >              chunk 0   0 > 1 > 2 > 3
    chunk 1 > 4 > 5 > 6 > 7                chunk 1   7 < 6 < 5 < 4

    route     0 1 2 3 0 1 2 3              route     0 1 2 3 3 2 1 0
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from sley_core.errors import PlanError


class StageChunk(NamedTuple):
    """Names the holder of a position: chunk `chunk` of stage `stage`, both counted from 0."""

    stage: int
    chunk: int


@dataclass(frozen=True)
class Placement:
    """Assigns the positions of a model to stages; a stage numbers its chunks in model order.

    route: the stage of each position, in model order. Neighbours may be on any two stages, or on the same one. Raises PlanError
    "placement-wrong" unless the stages are 0, 1, 2, ... without a gap and hold equally many positions each.
    """

    route: tuple[int, ...]

    def __post_init__(self) -> None:
        held = Counter(self.route)
        if not held:
            raise wrong_placement("has no positions")
        for stage in held:
            if type(stage) is not int or stage < 0:
                raise wrong_placement(f"names the stage {stage!r}, but stages are 0, 1, 2, ...")
        last = max(held)
        for stage in range(last + 1):
            if not held[stage]:
                raise wrong_placement(f"gives stage {stage} no part of the model, but stage {last} has one")
            if held[stage] != held[0]:
                parts = f"{held[stage]} of the {len(self.route)} parts of the model on stage {stage}, but {held[0]} on stage 0"
                raise wrong_placement(f"puts {parts}: every stage holds equally many")

    @cached_property
    def stages(self) -> int:
        """Number of stages."""
        return max(self.route) + 1

    @cached_property
    def chunks(self) -> int:
        """Number of positions that each stage holds."""
        return self.num_positions // self.stages

    @cached_property
    def num_positions(self) -> int:
        return len(self.route)

    def position(self, stage: int, chunk: int) -> int:
        """Returns the position of a stage's chunk along the model, from 0."""
        assert 0 <= stage < self.stages, f"stage {stage} of {self.stages}"
        assert 0 <= chunk < self.chunks, f"chunk {chunk} of {self.chunks}"
        return self._positions[stage][chunk]

    def positions(self, stage: int) -> Sequence[int]:
        """Returns the positions of a stage's chunks along the model, by the number of the chunk."""
        return self._positions[stage]

    def holder(self, position: int) -> StageChunk:
        """Returns the stage and chunk that hold `position`; the inverse of `position`."""
        assert 0 <= position < self.num_positions, f"position {position} of {self.num_positions}"
        return self._holders[position]

    def previous(self, stage: int, chunk: int) -> StageChunk | None:
        """Returns the chunk whose output this chunk takes, and which gets its input gradient; None at the first
        position.

        It may be another chunk of the same stage: then nothing is sent.
        """
        position = self.position(stage, chunk)
        return self.holder(position - 1) if position > 0 else None

    def next(self, stage: int, chunk: int) -> StageChunk | None:
        """Returns the chunk that takes this chunk's output, and gives it the gradient of that; None at the last position."""
        position = self.position(stage, chunk)
        return self.holder(position + 1) if position + 1 < self.num_positions else None

    @cached_property
    def _positions(self) -> tuple[tuple[int, ...], ...]:
        """Position by [stage][chunk]."""
        held: list[list[int]] = [[] for _ in range(self.stages)]
        for position, stage in enumerate(self.route):
            held[stage].append(position)
        return tuple(map(tuple, held))

    @cached_property
    def _holders(self) -> tuple[StageChunk, ...]:
        """Holder of each position."""
        seen: Counter[int] = Counter()
        holders = []
        for stage in self.route:
            holders.append(StageChunk(stage, seen[stage]))
            seen[stage] += 1
        return tuple(holders)


Placing = Callable[[int, int], Placement]
"""`(stages, chunks) -> the placement of so many`: pure. Raises PlanError for numbers that it cannot place."""


def loop(stages: int, chunks: int = 1) -> Placement:
    """Returns the interleaved placement: a sample passes all stages in order, `chunks` times."""
    return Placement(tuple(range(stages)) * chunks)


def v(stages: int, chunks: int = 2) -> Placement:
    """Returns the V placement: a sample passes all stages up, then down. Raises PlanError "placement-wrong" unless
    `chunks` is 2.
    """
    if chunks != 2:
        raise wrong_placement(f"is a V, which has two parts of the model per stage, not {chunks}")
    return Placement((*range(stages), *reversed(range(stages))))


def wrong_placement(fault: str) -> PlanError:
    """Returns the PlanError of an invalid placement. fault: the words for what is wrong."""
    return PlanError("placement-wrong", f"the schedule's placement {fault}", path=("pipeline", "use"))

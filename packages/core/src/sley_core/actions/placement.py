"""Which part of the model each stage holds, and who its neighbours are: integers only.

The layers of a model are cut into `stages x chunks` positions, in the order in which a sample passes them. A stage holds
`chunks` of them, dealt in a loop or, for two chunks, as a V that turns round on the last stage:

    loop, 4 stages, 2 chunks               V, 4 stages

    stage     0   1   2   3                stage     0   1   2   3
    chunk 0   0 > 1 > 2 > 3 >              chunk 0   0 > 1 > 2 > 3
    chunk 1 > 4 > 5 > 6 > 7                chunk 1   7 < 6 < 5 < 4
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Style = Literal["loop", "v"]


class Holder(NamedTuple):
    """Who holds a position: chunk `chunk` of stage `stage`, both counted from 0."""

    stage: int
    chunk: int


@dataclass(frozen=True)
class Placement:
    """How the positions of a model are dealt to `stages`, `chunks` each. Raises ValueError if there is no such deal."""

    stages: int
    chunks: int = 1
    style: Style = "loop"

    def __post_init__(self) -> None:
        if self.stages < 1 or self.chunks < 1:
            raise ValueError(f"{self.stages} stages with {self.chunks} chunks each, but there is at least one of both")
        if self.style == "v" and self.chunks != 2:
            raise ValueError(f"a V has two chunks per stage, not {self.chunks}")

    @property
    def num_positions(self) -> int:
        return self.stages * self.chunks

    def position(self, stage: int, chunk: int) -> int:
        """The place of that chunk on a sample's way through the model, from 0."""
        assert 0 <= stage < self.stages, f"stage {stage} of {self.stages}"
        assert 0 <= chunk < self.chunks, f"chunk {chunk} of {self.chunks}"
        if self.style == "v" and chunk == 1:
            return self.num_positions - 1 - stage
        return chunk * self.stages + stage

    def holder(self, position: int) -> Holder:
        """The inverse of `position`."""
        assert 0 <= position < self.num_positions, f"position {position} of {self.num_positions}"
        chunk, stage = divmod(position, self.stages)
        if self.style == "v" and chunk == 1:
            stage = self.stages - 1 - stage
        return Holder(stage, chunk)

    def previous(self, stage: int, chunk: int) -> Holder | None:
        """Whose output this chunk takes, and who gets its input gradient; None at the first position.

        The neighbour may be another chunk of the same stage: what passes between them is handed over in place.
        """
        position = self.position(stage, chunk)
        return self.holder(position - 1) if position > 0 else None

    def next(self, stage: int, chunk: int) -> Holder | None:
        """Who takes this chunk's output, and whose input gradient it gets; None at the last position."""
        position = self.position(stage, chunk)
        return self.holder(position + 1) if position + 1 < self.num_positions else None

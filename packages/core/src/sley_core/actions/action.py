"""The words that a step is written in.

A schedule generator writes compute actions only, `F0.3` for the forward of chunk 0 on micro-batch 3. `lower` adds the
rest; whoever reads a lowered list (the executor, the simulator, the drawing) reads the same words.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What an action does.

    FORWARD, BACKWARD: of one chunk on one micro-batch. INPUT_GRADIENT and WEIGHT_GRADIENT are the two halves of a split
    backward (arXiv 2401.10241). CHUNK_DONE is written by `lower`: every gradient of this chunk is complete now.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "D"
    WEIGHT_GRADIENT = "W"
    CHUNK_DONE = "C"


GRADIENT_KINDS = frozenset({Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT})
"""The actions after which a gradient may have changed."""


@dataclass(frozen=True, order=True)
class Action:
    """One line of a rank's list: `kind` on model chunk `chunk` and micro-batch `micro` (both counted from 0, per rank)."""

    kind: Kind
    chunk: int
    micro: int = -1

    def __str__(self) -> str:
        micro = "" if self.micro < 0 else f".{self.micro}"
        return f"{self.kind.value}{self.chunk}{micro}"


def sequential(num_micros: int) -> list[Action]:
    """The list without a pipeline, F0.0 B0.0 F0.1 B0.1 ...: one micro-batch is held at a time."""
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return [Action(kind, 0, micro) for micro in range(num_micros) for kind in kinds]


def forward_only(num_micros: int) -> list[Action]:
    """The list of an evaluation without a pipeline: F0.0 F0.1 ..."""
    return [Action(Kind.FORWARD, 0, micro) for micro in range(num_micros)]

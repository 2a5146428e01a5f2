"""The vocabulary in which a step is written.

A schedule generator writes compute actions only, `F0.3` for the forward of chunk 0 on micro-batch 3. `lower` adds the
rest: transfers between stages, and marks for finished chunks. The executor, the simulator and the drawing all read the
same lowered lists.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Literal, NamedTuple


class Kind(StrEnum):
    """Says what an action does.

    FORWARD, BACKWARD: of one chunk on one micro-batch. INPUT_GRADIENT and WEIGHT_GRADIENT are the two halves of a split
    backward (arXiv 2401.10241). CHUNK_DONE is written by `lower`: all gradients of this chunk are complete now.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "D"
    WEIGHT_GRADIENT = "W"
    CHUNK_DONE = "C"


GRADIENT_KINDS = frozenset({Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT})
"""The actions after which a gradient may have changed."""

SENDS_GRADIENT = frozenset({Kind.BACKWARD, Kind.INPUT_GRADIENT})
"""The actions that take the gradient of a chunk's output and make that of its input."""


class Action(NamedTuple):
    """Names one line of a rank's list: `kind` on model chunk `chunk` and micro-batch `micro` (both counted from 0, per rank). A
    tuple, as a search makes and looks up hundreds of thousands.
    """

    kind: Kind
    chunk: int
    micro: int = -1

    def __str__(self) -> str:
        micro = "" if self.micro < 0 else f".{self.micro}"
        return f"{self.kind.value}{self.chunk}{micro}"


Flow = Literal["forward", "backward"]
"""What a transfer carries: outputs of a chunk to the next one, or gradients to the one before."""

Direction = Literal["up", "down"]
"""Where a transfer goes: to a stage of a higher number, or of a lower one. Each direction has a communicator."""

DIRECTIONS: tuple[Direction, Direction] = ("up", "down")


def direction_of(sender: int, receiver: int) -> Direction:
    """Returns the direction from one stage to another. Between two stages each direction has a separate communicator."""
    return "up" if receiver > sender else "down"


class Transfer(NamedTuple):
    """Describes one end of a transfer between two stages.

    op: `post` prepares a buffer and starts the receive; the action that needs the value waits for it, so waiting has no entry
    of its own. `send` starts to send the result of the action before it. Neither blocks. chunk: this stage's. It receives its
    input (forward flow) or output gradient (backward flow), or sends its output or input gradient. peer: the stage at the other
    end. peer_chunk: the chunk there.
    """

    op: Literal["post", "send"]
    flow: Flow
    chunk: int
    micro: int
    peer: int
    peer_chunk: int

    def __str__(self) -> str:
        whom = "to" if self.op == "send" else "from"
        return f"{self.op} {self.flow} {self.chunk}.{self.micro} {whom} stage {self.peer}"


Step = Action | Transfer
"""A word of a lowered list."""

Lowered = tuple[Step, ...]
"""What one rank does in one step, in order."""


def sequential(num_micros: int) -> list[Action]:
    """Returns the list without a pipeline, F0.0 B0.0 F0.1 B0.1 ...: one micro-batch is in flight at a time."""
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return [Action(kind, 0, micro) for micro in range(num_micros) for kind in kinds]


def forward_only(actions: Iterable[Action]) -> list[Action]:
    """Returns the list of an evaluation: the forwards of a training list, in their order.

    Lists of all stages that run without deadlock still do so afterwards, since forwards wait for forwards alone.
    """
    return [action for action in actions if action.kind is Kind.FORWARD]


def actions_of(steps: Sequence[Step]) -> tuple[Action, ...]:
    """Returns a lowered list without its transfers."""
    return tuple(step for step in steps if isinstance(step, Action))


_ACTIONS = {
    "F": "the forward",
    "B": "the backward",
    "D": "the backward for inputs",
    "W": "the backward for weights",
    "C": "the end of the gradients",
}


def in_words(entry: str) -> str:
    """Returns an entry of a list as a person reads it: `F0.3` is the forward of chunk 0 on micro-batch 3."""
    found = re.match(r"([FBDWC])(\d+)(?:\.(\d+))?(.*)$", entry)
    if found is None:
        return entry
    kind, chunk, micro, more = found.groups()
    on = "" if micro is None else f" on micro-batch {micro}"
    return f"{_ACTIONS[kind]} of chunk {chunk}{on}{more} ({kind}{chunk}{'' if micro is None else f'.{micro}'})"

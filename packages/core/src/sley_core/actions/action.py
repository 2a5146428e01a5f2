"""Describes a step as data: actions, the placement of chunks on stages, and schedules, which generate actions.

A schedule generator writes compute actions only, such as `F0.3`, the forward of chunk 0 on microbatch 3. `lower` adds transfers
between stages, and marks for finished chunks. The executor, the simulator and the drawing all read the same lowered
lists.

The layers of a model are cut into `stages x chunks` positions, in the order in which a sample passes them. A stage holds
`chunks` of them. A placement is the route of a sample: the stage of each position. This module defines two placements; plugins
may define others (`PlacementFunction`):

    loop, 4 stages, 2 chunks               v, 4 stages

    stage     0   1   2   3                stage     0   1   2   3
    chunk 0   0 > 1 > 2 > 3 >              chunk 0   0 > 1 > 2 > 3
    chunk 1 > 4 > 5 > 6 > 7                chunk 1   7 < 6 < 5 < 4

    route     0 1 2 3 0 1 2 3              route     0 1 2 3 3 2 1 0
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Literal, NamedTuple

from sley_core.errors import PlanError


class Kind(StrEnum):
    """The type of an action.

    FORWARD and BACKWARD run one chunk on one microbatch. INPUT_GRADIENT and WEIGHT_GRADIENT are the two halves of a split
    backward (arXiv 2401.10241). CHUNK_DONE, which `lower` adds, marks the point at which all gradients of a chunk are complete.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    CHUNK_DONE = "C"

    @property
    def makes_gradients(self) -> bool:
        """Whether an action of this type may change a gradient."""
        return self in INPUT_GRADIENT_KINDS or self is Kind.WEIGHT_GRADIENT


INPUT_GRADIENT_KINDS = frozenset({Kind.BACKWARD, Kind.INPUT_GRADIENT})
"""The types of actions that compute the gradient of a chunk's input from the gradient of its output."""


class Action(NamedTuple):
    """An action in a rank's list. chunk: the rank's chunk, from 0. micro: the microbatch, from 0; -1 for CHUNK_DONE."""

    kind: Kind
    chunk: int
    micro: int = -1

    def __str__(self) -> str:
        micro = "" if self.micro < 0 else f".{self.micro}"
        return f"{self.kind.value}{self.chunk}{micro}"


Flow = Literal["forward", "backward"]
"""The content of a transfer: outputs of a chunk for the next ("forward"), or gradients for the previous ("backward")."""

Direction = Literal["up", "down"]
"""The direction of a transfer: "up" to a stage with a higher number, or else "down". Each direction has a communicator."""


def direction_of(sender: int, receiver: int) -> Direction:
    """Returns the direction of a transfer from stage `sender` to stage `receiver`."""
    return "up" if receiver > sender else "down"


class Transfer(NamedTuple):
    """Describes one end of a transfer between two stages.

    op: "post" prepares a buffer and starts the receive, for which the action that needs the value waits. "send" starts to send
    the result of the preceding action. Neither blocks. chunk: the chunk on this stage. A post
    receives the chunk's input (forward flow) or the gradient of its output (backward flow). A send sends the chunk's output or
    the gradient of its input. micro: the microbatch. peer: the stage at the other end. peer_chunk: the chunk on that stage.
    """

    op: Literal["post", "send"]
    flow: Flow
    chunk: int
    micro: int
    peer: int
    peer_chunk: int

    def __str__(self) -> str:
        preposition = "to" if self.op == "send" else "from"
        return f"{self.op} {self.flow} {self.chunk}.{self.micro} {preposition} stage {self.peer}"


Step = Action | Transfer
"""An entry of a lowered list."""

LoweredList = tuple[Step, ...]
"""The entries that one rank executes in one step, in order."""


def sequential_actions(num_microbatches: int) -> list[Action]:
    """Returns the actions of a step without a pipeline: F0.0 B0.0 F0.1 B0.1 ..."""
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return [Action(kind, 0, micro) for micro in range(num_microbatches) for kind in kinds]


def select_forwards(actions: Iterable[Action]) -> list[Action]:
    """Returns the forwards of a training step, for an evaluation. The forwards keep their order, so they cannot deadlock."""
    return [action for action in actions if action.kind is Kind.FORWARD]


def select_actions(steps: Sequence[Step]) -> tuple[Action, ...]:
    """Returns the entries of a lowered list that are not transfers."""
    return tuple(step for step in steps if isinstance(step, Action))


_KIND_TEXTS = {  # names for messages
    "F": "forward",
    "B": "backward",
    "I": "backward for inputs",
    "W": "backward for weights",
    "C": "end of the gradients",
}


def describe_action(entry: str) -> str:
    """Returns an action in words: `the forward of chunk 0 on microbatch 3 (F0.3)` for `F0.3`. Returns other text unchanged."""
    match = re.match(r"(([FBIWC])(\d+)(?:\.(\d+))?)(.*)$", entry)
    if match is None:
        return entry
    action, kind, chunk, micro, suffix = match.groups()
    return f"the {_KIND_TEXTS[kind]} of chunk {chunk}{f' on microbatch {micro}' if micro else ''}{suffix} ({action})"


class Delivery(NamedTuple):
    """Identifies a value that a chunk computes for a neighbour in microbatch `micro`. position: the receiver's position."""

    flow: Flow
    position: int
    micro: int

    @property
    def source_position(self) -> int:
        """The position of the chunk that computes the value."""
        return self.position + (-1 if self.flow == "forward" else 1)


class StageChunk(NamedTuple):
    """Identifies a chunk by its stage and its number in the stage, both from 0."""

    stage: int
    chunk: int


@dataclass(frozen=True)
class Placement:
    """Assigns the positions of a model to stages. A position is a run of consecutive layers, which one stage computes. A stage
    numbers its positions in model order, and calls them chunk 0, chunk 1 and so on. route: the stage of each position, in
    order. Neighbouring positions may be on any two stages, or on the same one. The constructor raises PlanError
    "placement-wrong" unless the stages are 0, 1, 2, ... without a gap, and each of them holds the same number of positions.
    """

    route: tuple[int, ...]

    def __post_init__(self) -> None:
        counts = Counter(self.route)
        if sorted(counts) != list(range(len(counts))) or len(set(counts.values())) != 1:
            texts = ", ".join(f"{count} on stage {stage}" for stage, count in sorted(counts.items())[:4])
            raise placement_error(
                f"must have the same number of chunks on each of the stages 0, 1, 2, ..., but has {texts or 'none'}"
            )

    @cached_property
    def stages(self) -> int:
        return max(self.route) + 1

    @cached_property
    def chunks(self) -> int:
        """The number of positions that each stage holds."""
        return self.num_positions // self.stages

    @cached_property
    def num_positions(self) -> int:
        return len(self.route)

    def position(self, stage: int, chunk: int) -> int:
        """Returns the position in the model, from 0, of chunk `chunk` of `stage`."""
        assert 0 <= stage < self.stages, f"stage {stage} of {self.stages}"
        assert 0 <= chunk < self.chunks, f"chunk {chunk} of {self.chunks}"
        return self._positions[stage][chunk]

    def positions(self, stage: int) -> Sequence[int]:
        """Returns the positions in the model that `stage` holds, in ascending order: entry i is the position of chunk i."""
        return self._positions[stage]

    def holder(self, position: int) -> StageChunk:
        """Returns the stage and chunk at `position`. Inverse of the method `position`."""
        assert 0 <= position < self.num_positions, f"position {position} of {self.num_positions}"
        return self._holders[position]

    def previous(self, stage: int, chunk: int) -> StageChunk | None:
        """Returns the chunk whose output is the input of chunk `chunk` of `stage`, or None at the model's first position."""
        position = self.position(stage, chunk)
        return self.holder(position - 1) if position > 0 else None

    def next(self, stage: int, chunk: int) -> StageChunk | None:
        """Returns the chunk whose input is the output of chunk `chunk` of `stage`, or None at the model's last position."""
        position = self.position(stage, chunk)
        return self.holder(position + 1) if position + 1 < self.num_positions else None

    def input_of(self, action: Action, position: int) -> Delivery | None:
        """Returns the value that `action` at `position` needs from a neighbouring chunk, or None if there is none."""
        if action.kind is Kind.FORWARD and position > 0:
            return Delivery("forward", position, action.micro)
        if action.kind in INPUT_GRADIENT_KINDS and position + 1 < self.num_positions:
            return Delivery("backward", position, action.micro)
        return None

    def output_of(self, action: Action, position: int) -> Delivery | None:
        """Returns the value that `action` at `position` computes for a neighbouring chunk, or None if there is none."""
        if action.kind is Kind.FORWARD and position + 1 < self.num_positions:
            return Delivery("forward", position + 1, action.micro)
        if action.kind in INPUT_GRADIENT_KINDS and position > 0:
            return Delivery("backward", position - 1, action.micro)
        return None

    @cached_property
    def _holders(self) -> list[StageChunk]:
        return [StageChunk(stage, self.route[:position].count(stage)) for position, stage in enumerate(self.route)]

    @cached_property
    def _positions(self) -> list[list[int]]:
        return [[position for position, owner in enumerate(self.route) if owner == stage] for stage in range(self.stages)]


def evaluation_lists(placement: Placement, num_microbatches: int) -> list[list[Action]]:
    """Returns forwards for each stage that fit any placement and any number of microbatches, for an evaluation. A stage runs
    groups of microbatches, one for each position of the model, through each of its chunks in turn.
    """
    size = placement.num_positions
    groups = [range(first, min(first + size, num_microbatches)) for first in range(0, num_microbatches, size)]
    chunks = range(placement.chunks)
    actions = [Action(Kind.FORWARD, chunk, micro) for group in groups for chunk in chunks for micro in group]
    return [actions] * placement.stages


PlacementFunction = Callable[[int, int], Placement]
"""A pure function `(stages, chunks per stage) -> placement`. It raises PlanError if it does not support these numbers."""


def loop(stages: int, chunks: int = 1) -> Placement:
    """Returns the placement in which a sample passes through all stages in order, `chunks` times."""
    return Placement(tuple(range(stages)) * chunks)


def v_placement(stages: int, chunks: int = 2) -> Placement:
    """Returns the V-shaped placement: up through all stages, then down. Raises PlanError "placement-wrong" if `chunks` != 2."""
    if chunks != 2:
        raise placement_error(f"is a V, which needs two chunks per stage, not {chunks}")
    return Placement((*range(stages), *reversed(range(stages))))


def placement_error(fault: str) -> PlanError:
    """Returns PlanError "placement-wrong". fault: the predicate of the message, such as "is a V"."""
    return PlanError("placement-wrong", f"the schedule's placement {fault}", path=("pipeline", "use"))


ScheduleGenerator = Callable[[int, int, int], list[list[Action]]]
"""A pure function of the numbers of stages, of chunks per stage, and of microbatches. It returns one list of compute actions
per stage, and raises PlanError if it does not support these numbers.
"""


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule. generate: returns every stage's compute actions. chunks: the number of chunks per stage. place: a
    function such as `loop` or `v_placement`, which returns the placement.
    """

    generate: ScheduleGenerator
    chunks: int = 1
    place: PlacementFunction = loop

    def placement(self, stages: int) -> Placement:
        """Returns the placement for `stages`. Raises PlanError "placement-wrong" unless each stage holds `chunks` positions."""
        placement = self.place(stages, self.chunks)
        if (placement.stages, placement.chunks) != (stages, self.chunks):
            actual = f"{placement.chunks} chunks on each of {placement.stages} stages"
            raise placement_error(f"has {actual}, but the plan has {self.chunks} on each of {stages}")
        return placement

    def lists(self, stages: int, micros: int) -> list[list[Action]]:
        """Returns the compute actions of each stage in a training step of `micros` microbatches. `lower` adds the transfers."""
        return [list(actions) for actions in self.generate(stages, self.chunks, micros)]

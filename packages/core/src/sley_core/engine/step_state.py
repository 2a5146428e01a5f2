"""The current step, microbatch and action of a rank, for the store, handlers, communicators and offload managers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sley_core.actions.action import Action
from sley_core.comm.progress import ActionProgress


class Phase(StrEnum):
    """The purpose of a call: training, recomputation in a backward, deferred weight gradients, or an evaluation."""

    TRAIN = "train"
    RECOMPUTE = "recompute"
    WEIGHTS = "weights"
    EVALUATE = "evaluate"


@dataclass(frozen=True)
class MicroStep:
    """Identifies a call. global_micro: the number in the global batch. layer: the layer of a reported recomputation."""

    chunk: int
    micro: int
    phase: Phase
    step: int
    global_micro: int
    layer: str = ""


class StepState:
    """This rank's position in its list of actions.

             begin ──> enter(action) ──> leave(action) ──> enter ... ──> begin of the next step

    step: the optimizer step, from 0. num_micros: the number of this rank's microbatches in the step. first_micro: the global
    number of the first of them. after_first: called once, after the first action. done: the chunks whose last gradient action
    is over. step_progress: the position for failure reports.
    """

    def __init__(self, within: ActionProgress | None = None) -> None:
        """within: for an evaluation, the progress of the training; the evaluation begins no step of it."""
        self._is_within = within is not None
        self.step_progress = within or ActionProgress()
        self.step = -1
        self.num_micros = 0
        self.first_micro = 0
        self._was_taken = True
        self._read_was_taken: Callable[[], bool] | None = None
        self.action: Action | None = None
        self.after_first: Callable[[], None] | None = None
        self._last: dict[int, Action] = {}
        self.done: frozenset[int] = frozenset()
        self._settled: frozenset[int] | None = None

    def begin(self, step: int, actions: Sequence[Action], num_micros: int, first_micro: int) -> None:
        self.step = step
        if not self._is_within:
            self.step_progress.begin(step + 1)
        self.num_micros = num_micros
        self.first_micro = first_micro
        self.action = None
        self.after_first = None
        self._last = {action.chunk: action for action in actions if action.kind.makes_gradients}
        self.done = frozenset()
        self._settled = None

    @property
    def was_taken(self) -> bool:
        """Returns whether the last step changed weights. Otherwise a handler's copies of its gradients are useless."""
        if self._read_was_taken is not None:
            self.was_taken = self._read_was_taken()
        return self._was_taken

    @was_taken.setter
    def was_taken(self, taken: bool) -> None:
        self._was_taken, self._read_was_taken = taken, None

    def defer_was_taken(self, read: Callable[[], bool]) -> None:
        """Sets `was_taken` to the result of `read`, which is called when it is first read and may wait for the device."""
        self._read_was_taken = read

    def micro_step(self, action: Action, phase: Phase) -> MicroStep:
        return MicroStep(action.chunk, action.micro, phase, self.step, self.first_micro + action.micro)

    def enter(self, action: Action) -> None:
        """Marks `action` as running, and records whether it is its chunk's last gradient action."""
        self.action = action
        is_last = self._last.get(action.chunk) == action
        self._settled = self.done | {action.chunk} if is_last else None

    def leave(self, action: Action) -> None:
        """Ends `action`: marks a chunk as done after its last action, and calls `after_first` after the step's first action."""
        if self._last.get(action.chunk) == action:
            self.done |= {action.chunk}
        self.action = None
        self._settled = None
        if self.after_first is not None:
            after, self.after_first = self.after_first, None
            after()

    def is_last_of_list(self, chunks: frozenset[int]) -> bool:
        """Returns whether no later action of the list can add to a gradient that `chunks` share."""
        return self._settled is not None and chunks <= self._settled

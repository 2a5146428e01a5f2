"""Moments of a step at which plugins that are no gradient handlers are called, and stepping the weights in buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from sley_core.engine.weights import Stepped
    from sley_core.memory.state import Part

Event: TypeAlias = Callable[[], None]
Buckets: TypeAlias = Callable[[Sequence["Stepped"]], Iterator[Sequence["Stepped"]]]
"""Given all that is stepped, yields it in buckets. Each bucket is stepped after it is yielded and before the next one is
requested; the iterator is closed if that fails.
"""


class StepEvents:
    """Lists what a step calls, in the order of registration, on this rank alone: none of it may communicate.

    began: before the first forward. gradients_done: all gradients are reduced, and nothing is updated yet. after_update: after
    the update of any step that did not raise, taken or not.

    came_back: between two steps, with the name of a part of the run's memory that is on the device again, or on its way. Its
    tensors, views and hooks are those from before, but their addresses may be others: for a plugin that has kept any, as a CUDA
    graph or a registered buffer does.

    step_in_buckets: makes the optimizer step one bucket at a time; None steps everything at once.
    """

    def __init__(self) -> None:
        self.began: list[Event] = []
        self.gradients_done: list[Event] = []
        self.after_update: list[Event] = []
        self.came_back: list[Callable[[Part], None]] = []
        self.step_in_buckets: Buckets | None = None


def call(events: Sequence[Event]) -> None:
    """Calls each of `events`."""
    for event in events:
        event()

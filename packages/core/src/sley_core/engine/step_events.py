"""Moments of a step at which plugins that are no gradient handlers are called, and stepping the weights in buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeAlias

from sley_core.errors import RunError
from sley_core.optim.shared import Shared, can_compare, changed, copied, put, same, shared_values

if TYPE_CHECKING:
    import torch

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


def step_buckets(
    optimizer: torch.optim.Optimizer, stepped: Sequence[Stepped], buckets: Buckets, step: Callable[[], None]
) -> None:
    """Calls `step`, which steps `optimizer`, once for each bucket, with only the bucket's parameters in the groups.

    Gives the same update as one call if each parameter's update depends on no other parameter. Each call finds what the
    optimizer keeps for all parameters, such as a count of steps, as it was before the first. Raises RunError
    `optimizer-counts-steps` if two calls leave different values.
    """
    groups = _Groups(optimizer)
    before = copied(shared_values(optimizer))
    after: Shared = {}
    try:
        with closing(buckets(stepped)) as order:  # type: ignore[type-var]  # a generator
            for bucket in order:
                groups.choose(bucket)
                if after:
                    put(optimizer, copied(before))
                step()
                before |= groups.added()
                found = changed(before, shared_values(optimizer))
                for place, value in found.items():
                    if place in after and can_compare(value) and not same(value, after[place]):
                        raise _counts(optimizer, place)
                after |= found
        if after:
            put(optimizer, before | after)
    finally:
        groups.restore()


class _Groups:
    """The groups of an optimizer, of which only the parameters of one bucket are stepped at a time."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._whole: list[list[Any]] = [group["params"] for group in optimizer.param_groups]

    def choose(self, bucket: Sequence[Stepped]) -> None:
        """Leaves only the parameters of `bucket` in the groups."""
        chosen = {id(one.parameter) for one in bucket}
        for group, parameters in zip(self._optimizer.param_groups, self._whole, strict=True):
            group["params"] = [parameter for parameter in parameters if id(parameter) in chosen]

    def added(self) -> Shared:
        """Returns the options of groups that a step has made, of parameters from other groups."""
        number = len(self._whole)
        new = self._optimizer.param_groups[number:]
        moved = {id(parameter) for group in new for parameter in group["params"]}
        if new:
            self._whole = [[one for one in every if id(one) not in moved] for every in self._whole]
            self._whole += [group["params"] for group in new]
            every = shared_values(self._optimizer)
            return copied({at: one for at, one in every.items() if at[0] == "option" and at[1] >= number})
        return {}

    def restore(self) -> None:
        """Puts all parameters back."""
        for group, parameters in zip(self._optimizer.param_groups, self._whole, strict=True):
            group["params"] = parameters


def _counts(optimizer: torch.optim.Optimizer, place: tuple[str, Any, Any]) -> RunError:
    return RunError(
        "optimizer-counts-steps",
        f"{type(optimizer).__name__} computes its {place[0]} {place[2]!r} from the parameters that it steps, so it cannot be "
        "stepped bucket by bucket",
        hint='use `when = "idle"`, or an optimizer that keeps its numbers with each parameter',
    )

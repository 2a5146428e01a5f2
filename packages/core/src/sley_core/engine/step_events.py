"""Moments of a step at which plugins that are no gradient handlers are called, and stepping the weights in buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeAlias

from sley_core.errors import RunError

if TYPE_CHECKING:
    import torch

    from sley_core.engine.masters import Stepped
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

    Gives the same update as one call if each parameter's update depends on no other parameter. Raises RunError
    `optimizer-counts-steps` if a step changes an option in the optimizer's groups, such as a step counter: it would count
    buckets.
    """
    groups = optimizer.param_groups
    whole = [group["params"] for group in groups]
    of_group = {id(parameter): at for at, parameters in enumerate(whole) for parameter in parameters}
    try:
        with closing(buckets(stepped)) as order:  # type: ignore[type-var]  # a generator
            for bucket in order:
                chosen: list[list[Any]] = [[] for _ in groups]
                for one in bucket:
                    chosen[of_group[id(one.parameter)]].append(one.parameter)
                for group, parameters in zip(groups, chosen, strict=True):
                    group["params"] = parameters
                before = [_options(group) for group in groups]
                step()
                if before != [_options(group) for group in groups]:
                    raise _counts(optimizer)
    finally:
        for group, parameters in zip(groups, whole, strict=True):
            group["params"] = parameters


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Returns the plain values of a group; leaves out tensors, such as a learning rate on the device."""
    return {key: value for key, value in group.items() if isinstance(value, bool | int | float | str | tuple)}


def _counts(optimizer: torch.optim.Optimizer) -> RunError:
    return RunError(
        "optimizer-counts-steps",
        f"{type(optimizer).__name__} changes its groups as it steps, so it cannot be stepped bucket by bucket",
        hint='use `when = "idle"`, or an optimizer that keeps its numbers with each parameter',
    )

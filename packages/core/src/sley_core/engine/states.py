"""What a run's optimizer keeps for each parameter, by names that do not depend on the layout: for checkpoints and reports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from sley_core.engine.cuts import Span
    from sley_core.engine.update import Update

MASTER = "master"


class HeldState(NamedTuple):
    """A tensor that this rank holds for the parameter `name` of the book.

    span: of which elements of its flattened parameter (a shard's, where weights are sharded); None for all of them. state:
    `master`, or the optimizer's own word, such as `exp_avg`; a counter, such as `step`, belongs to the whole parameter.
    """

    name: str
    span: Span | None
    state: str
    tensor: Tensor


def states_of(update: Update) -> Iterator[HeldState]:
    """Yields masters and optimizer states of this rank, live tensors; none of an optimizer that has not made its states yet."""
    for stepped in update.masters.stepped:
        if update.masters.has_master(stepped):
            yield HeldState(stepped.name, stepped.span, MASTER, stepped.parameter.detach())
        for state, value in update.optimizer.state.get(stepped.parameter, {}).items():
            if isinstance(value, Tensor):
                yield HeldState(stepped.name, stepped.span, state, value)

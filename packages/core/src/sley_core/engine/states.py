"""What a run's optimizer keeps for each parameter, by names that do not depend on the layout: for checkpoints and reports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path

if TYPE_CHECKING:
    from sley_core.engine.cuts import Span
    from sley_core.engine.masters import Stepped
    from sley_core.engine.update import Update

MASTER = "master"


class HeldState(NamedTuple):
    """A tensor that this rank holds for the parameter `name` of the book.

    span: of which elements of its flattened parameter (a shard's, where weights are sharded); None for all of them. state:
    `master`, or the optimizer's own word, such as `exp_avg`, of a nested state with the way to it (`factors.0`); a counter,
    such as `step`, belongs to the whole parameter.
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
        for state, tensor in optimizer_states(update, stepped):
            yield HeldState(stepped.name, stepped.span, state, tensor)


def optimizer_states(update: Update, stepped: Stepped) -> Iterator[tuple[str, Tensor]]:
    """Yields name and tensor of what the optimizer keeps for one parameter, nested ones too; none before its first step."""
    return named_tensors(update.optimizer.state.get(stepped.parameter, {}))


def named_tensors(nested: object) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors in dicts, lists and tuples, each with the way to it, as `factors.0`; no words for a bare tensor."""
    for path, value in tree_flatten_with_path(nested)[0]:
        if isinstance(value, Tensor):
            yield ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path), value

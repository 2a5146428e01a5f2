"""What a run's optimizer keeps for each parameter, by names that do not depend on the layout; for checkpoints and reports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path

if TYPE_CHECKING:
    from sley_core.engine.buffers import Span
    from sley_core.engine.update import Update
    from sley_core.engine.weights import Stepped

MASTER = "master"


class HeldState(NamedTuple):
    """Holds a tensor that this rank keeps for the parameter `name` of the book.

    span: the elements of its flattened parameter (of a shard, if weights are sharded) that it is for; None for all. state:
    `master`, or the optimizer's own key, such as `exp_avg`, for a nested state its path (`factors.0`); a counter, such as
    `step`, belongs to the whole parameter.
    """

    name: str
    span: Span | None
    state: str
    tensor: Tensor


def states_of(update: Update) -> Iterator[HeldState]:
    """Yields masters and optimizer states of this rank, live tensors; no states if the optimizer has not made them yet."""
    for stepped in update.masters.stepped:
        if update.masters.has_master(stepped):
            yield HeldState(stepped.name, stepped.span, MASTER, stepped.parameter.detach())
        for state, tensor in optimizer_states(update, stepped):
            yield HeldState(stepped.name, stepped.span, state, tensor)


def optimizer_states(update: Update, stepped: Stepped) -> Iterator[tuple[str, Tensor]]:
    """Yields name and tensor of what the optimizer keeps for one parameter, nested ones too; nothing before its first step."""
    return named_tensors(update.optimizer.state.get(stepped.parameter, {}))


def named_tensors(nested: object) -> Iterator[tuple[str, Tensor]]:
    """Yields path and tensor of the tensors in nested dicts, lists and tuples; the path is as `factors.0`, "" for a bare
    tensor.
    """
    for path, value in tree_flatten_with_path(nested)[0]:
        if isinstance(value, Tensor):
            yield ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path), value

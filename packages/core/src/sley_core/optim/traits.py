"""What an optimizer of a user's own needs that torch's do not: gradients of its own, a seed for each step, two modes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Traits:
    """Says how an optimizer behaves. keeps_gradients: it keeps the gradient itself, not a copy. draws: its steps draw from
    torch's generators. has_modes: it has `train()` and `eval()`, as schedule-free ones do: after `eval()` the weights are those
    to evaluate and to save.
    """

    keeps_gradients: bool = False
    draws: bool = False
    has_modes: bool = False


PLAIN = Traits()
"""The traits of torch's own optimizers."""


def has_modes(optimizer: object) -> bool:
    """Returns whether an optimizer has `train()` and `eval()`."""
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


def in_training(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Calls `train()` of an optimizer that has modes; returns the same `optimizer`."""
    if has_modes(optimizer):
        optimizer.train()  # type: ignore[attr-defined]  # it has it
    return optimizer


def with_own_gradients(optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a function that gives each parameter a copy of its gradient, which nobody else writes, and calls `step`."""

    def stepped() -> Any:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()
        return step()

    return stepped

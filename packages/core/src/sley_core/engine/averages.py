"""Averages of the weights over steps (`[averaging]`). Evaluations and saved weights use them; training keeps the raw weights.

An average is elementwise. Each rank therefore averages only the tensor elements that its optimizer updates, without
communication, and averages have the same bits in every layout in which the weights have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sley_core.errors import RunError

if TYPE_CHECKING:
    from sley_core.engine.weights import Stepped

AVERAGE = "average"
"""The name of an average among the states of a parameter."""


@dataclass(eq=False)
class Averages:
    """Holds the average of each tensor that this rank's optimizer updates, in the same dtype.

    rule: returns the weight of the updated weights in their average, as `records.AveragingRecord` describes. name: the name of
    the rule in the plan. first_update: the index of the last update after which the averages were equal to the weights; None
    if there are no averages yet. tensors: the averages by updated tensor; they exist after the first update.
    """

    rule: Callable[[int, int], float]
    name: str
    first_update: int | None = field(default=None, init=False)
    tensors: dict[nn.Parameter, Tensor] = field(default_factory=dict, init=False)

    def add(self, stepped: Sequence[Stepped]) -> None:
        """Adds averages of tensors that are new to the optimizer, equal to the present values."""
        for entry in stepped:
            if entry.parameter not in self.tensors:
                self.tensors[entry.parameter] = entry.parameter.detach().clone()

    def update(self, stepped: Sequence[Stepped], step: int, index: int, allowed: Tensor | None) -> None:
        """Adds the updated values of `stepped` to their averages.

        step: the number of the step, from 0. index: the number of updates before this one. allowed: a bool on the device; if
        it is false, the step has changed nothing and changes no average. Raises RunError `averaging-weight`.
        """
        weight = 1.0
        if self.first_update is not None and index > self.first_update:
            weight = self.rule(step, index - self.first_update)
            if not 0.0 <= weight <= 1.0:
                message = f"`{self.name}` returned the weight {weight} in step {step + 1}, which must be from 0 to 1"
                raise RunError("averaging-weight", message, hint="report this to the authors of the rule")
        if weight == 1.0:
            self.first_update = index
        if stepped and weight > 0.0:
            averages = [self.tensors[entry.parameter] for entry in stepped]
            _average(averages, [entry.parameter.detach() for entry in stepped], weight, allowed)

    @torch.no_grad()
    def swap(self, stepped: Sequence[Stepped]) -> Callable[[], object]:
        """Exchanges the values of `stepped` and of their averages. Returns a function that restores the bits of both."""
        for entry, average in list_averages(self, stepped):
            value = entry.parameter.detach().clone()
            entry.parameter.copy_(average)
            average.copy_(value)
        return lambda: self.swap(stepped)

    def reset(self) -> None:
        """Drops the averages. The next update starts new ones."""
        self.first_update = None
        self.tensors.clear()


def list_averages(averages: Averages | None, stepped: Sequence[Stepped]) -> list[tuple[Stepped, Tensor]]:
    """Returns the tensors of `stepped` that have an average, each with its average; [] without [averaging]."""
    if averages is None:
        return []
    return [(entry, averages.tensors[entry.parameter]) for entry in stepped if entry.parameter in averages.tensors]


@torch.no_grad()
def _average(averages: list[Tensor], values: list[Tensor], weight: float, allowed: Tensor | None) -> None:
    """Moves `averages` towards `values` by the share `weight`, or by 0 if `allowed` is false."""
    if allowed is not None:
        torch._foreach_lerp_(averages, values, [(weight * allowed).to(averages[0].dtype)] * len(averages))
    elif weight == 1.0:
        torch._foreach_copy_(averages, values)
    elif averages[0].device.type != "cpu":
        torch._foreach_lerp_(averages, values, weight)
    else:
        # Not `lerp`, whose CPU kernel rounds the last elements of a tensor differently: a shard ends elsewhere.
        for average, value in zip(averages, values, strict=True):
            average.add_((value - average).mul_(weight))

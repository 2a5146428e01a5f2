"""Checks that a loss is a sum over positions, which it must be if the ranks of `sp` have slices of the sequence.

    right    loss(positions 0 to 15) = loss(0 to 7) + loss(8 to 15)
    wrong    labels that the loss shifts itself, a term that compares neighbours, a mean over the sequence

A term between two slices would be lost, and the weight of a batch does not show it. So the loss is evaluated, in the first
forward that can show it, on a few positions of this rank's own output. No communication is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy, deepcopy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sley_core.errors import RunError

if TYPE_CHECKING:
    from sley_core.data.dataset import Field
    from sley_core.protocols import Loss

_OF_HALF = 2**-6
"""Relative tolerance between the whole and the sum of its halves if the loss computes in a narrower type: bf16 has 8 bits."""

WINDOW = 16
"""Positions per check; checked at the beginning, the middle and the end of a slice."""


class OverPositions:
    """Checks `loss` at each forward until one has shown that it is a sum. fields: what the dataset declares."""

    def __init__(self, loss: Loss, fields: Mapping[str, Field]) -> None:
        self.loss = loss
        self.fields = fields
        self._is_shown = False

    @torch.no_grad()
    def check(self, output: object, batch: Mapping[str, Tensor]) -> None:
        """Raises RunError "loss-not-additive" for a loss that relates one position to another.

        output: the model's output for `batch`, whose fields are this rank's slice. Not checked are losses that draw random
        numbers, and those that cannot be evaluated on a part: their output has no dim of positions.
        """
        if self._is_shown or type(output) is not Tensor:
            return
        known = (
            (field.sequence_dim, batch[name].shape[field.sequence_dim])
            for name, field in self.fields.items()
            if field.sequence_dim is not None and name in batch
        )
        dim, length = next(known, (0, 0))
        size = min(WINDOW, length) // 2 * 2
        if size < 2 or output.ndim <= dim or output.shape[dim] != length:
            return
        shown = [
            self._ask(output, batch, dim, start, size) for start in sorted({0, (length - size) // 2, length - size})
        ]
        self._is_shown = any(shown)

    def _ask(self, output: Tensor, batch: Mapping[str, Tensor], dim: int, start: int, size: int) -> bool:
        """Compares the loss of a window with the sum over its halves; returns whether no further check is needed."""
        half = size // 2
        spans = (start, size), (start, half), (start + half, half)
        devices = [output.device] if output.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices):
                # Called on a copy: a loss may have state, such as a count of its calls.
                loss = deepcopy(self.loss) if isinstance(self.loss, nn.Module) else copy(self.loss)
                found = [_of(loss, self._window(output, batch, dim, *span)) for span in (*spans, spans[0])]
        except Exception:  # a loss need not take a part of an output, nor another type, nor be copied
            return True  # it cannot be checked, and is not tried again in every forward
        whole, left, right, again = (float(one) for one in found)
        scale = max(abs(whole), abs(left), abs(right))
        limit = 1e-6 if all(one.dtype == torch.float64 for one in found) else _OF_HALF
        if not 0 < scale < float("inf"):
            return False  # no label counts in this window
        if abs(left + right - whole) <= limit * scale or whole != again:
            return True
        raise RunError(
            "loss-not-additive",
            f"the loss of {size} positions is {whole:g}, but that of its halves is {left:g} + {right:g} = {left + right:g}: "
            "it looks from one position to another, and the ranks of `sp` have slices",
            path=("parallel", "sp"),
            hint="let a loss be a sum over positions, of labels that the data shifts; for one that compares or averages "
            'positions write sequence = "whole" in [loss]',
        )

    def _window(
        self, output: Tensor, batch: Mapping[str, Tensor], dim: int, start: int, size: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns `size` positions of output and batch, from `start` on."""
        part = {}
        for name, value in batch.items():
            along = self.fields[name].sequence_dim
            part[name] = value if along is None else value.narrow(along, start, size)
        return output.narrow(dim, start, size), part


def _of(loss: Loss, window: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
    """Returns the loss of a window, computed in fp64 if the loss can be."""
    output, part = window
    try:
        return loss.loss(output.double(), part)
    except RuntimeError:  # it has tensors of the model's type
        return loss.loss(output, part)

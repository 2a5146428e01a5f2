"""The loss weight of the global batch: known from the data alone, before the first backward.

Dividing once by it makes gradients independent of micro-batches, dp, sp and padding; a mean of means does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from sley_core.data.cut import cut
from sley_core.data.slices import adds_up
from sley_core.errors import RunError

if TYPE_CHECKING:
    from sley_core.data.dataset import Field
    from sley_core.protocols import Loss

MOST_SHAPES = 16
"""How many shapes of batch are checked."""


class BatchWeight:
    """Holds the divisor of every gradient.

    total: returns the sum of all ranks' weights; called in the first backward, since the sum is exchanged during the first
    forward. scale: the factor of every gradient until the step ends (fp16).
    """

    def __init__(self, total: Callable[[], float], scale: float = 1.0) -> None:
        self.scale = scale
        self._total = total
        self._inverse: Tensor | None = None

    def inverse(self, like: Tensor) -> Tensor:
        """Returns scale / weight as a scalar of the dtype of the loss `like`; 0 if the batch has weight 0. The first call may
        wait.
        """
        if self._inverse is None:
            total = self._total()
            self._inverse = like.new_full((), self.scale / total if total > 0 else 0.0)
        return self._inverse


class Additive:
    """Checks that the weight of a batch is the sum of its micro-batches' weights, once for each of its first shapes."""

    def __init__(self, loss: Loss, fields: Mapping[str, Field]) -> None:
        self.loss = loss
        self.fields = fields
        self._shown: set[tuple[object, ...]] = set()

    def check(self, batch: Mapping[str, Tensor], num_micros: int) -> None:
        """Raises RunError "loss-not-additive" for a loss that counts something once per micro-batch, as a mean does.

        Called on every rank of a replica alike, whether or not the model's last chunk is there.
        """
        if num_micros == 1 or len(self._shown) >= MOST_SHAPES:
            return
        shape = (num_micros, *(tuple(value.shape) for value in batch.values()))
        if shape in self._shown:
            return
        whole = self.loss.weight(batch)
        parts = [self.loss.weight(cut(batch, self.fields, micro, num_micros)) for micro in range(num_micros)]
        if not adds_up(parts, whole):
            weights = " + ".join(f"{part:g}" for part in parts[:4]) + (" + ..." if num_micros > 4 else "")
            raise RunError(
                "loss-not-additive",
                f"the loss weight of a batch is {whole:g}, but its {num_micros} micro-batches weigh {weights} = {sum(parts):g}",
                path=("loss",),
                hint='a loss returns a sum and not a mean, such as `F.cross_entropy(..., reduction="sum")`, and its weight '
                'counts what is summed, such as `(batch["labels"] != -100).sum().item()`; a step divides by it once',
            )
        self._shown.add(shape)

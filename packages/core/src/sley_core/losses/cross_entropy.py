"""Cross-entropy as a weight and a sum, so that its scale does not depend on how a batch is cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sley_core.errors import PlanError, RunError
from sley_core.losses.config import CrossEntropyConfig
from sley_core.protocols import Loss

WIDE = (torch.float32, torch.float64)
"""Types in which the softmax may be taken as it comes; anything narrower is widened to fp32 first."""


class CrossEntropy(Loss):
    """The loss `core.cross_entropy`: over any cut of a batch, weights and losses add up to those of the whole.

    Labels are classes, int64 of any shape [...]; the model's output is a tensor of logits [..., classes].
    """

    def __init__(self, config: CrossEntropyConfig) -> None:
        self.config = config

    def weight(self, batch: Mapping[str, Tensor]) -> float:
        """How many labels of these samples are not ignored; reads the labels alone, on the host."""
        labels = self._labels(batch)
        return float(labels.numel() - int((labels == self.config.ignore_index).sum()))

    def loss(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """The sum of the cross-entropies, in nats: an fp32 scalar, fp64 for fp64 logits.

        The softmax is fp32 at least. fp32 logits are not copied before it, and its result is all that is kept for the
        backward. A cut without a label that counts gives 0 with zero gradients, not NaN.

        Raises RunError where the output is no tensor of logits that fits the labels.
        """
        labels = self._labels(batch)
        logits = _fitting(output, labels)
        if logits.dtype not in WIDE:
            logits = logits.float()
        return F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]),
            labels.reshape(-1),
            ignore_index=self.config.ignore_index,
            label_smoothing=self.config.label_smoothing,
            reduction="sum",
        )

    def _labels(self, batch: Mapping[str, Tensor]) -> Tensor:
        name = self.config.labels
        if name not in batch:
            fields = ", ".join(f"`{field}`" for field in sorted(batch))
            raise PlanError(
                "loss-field",
                f"the loss reads the field `{name}`, but a batch holds {fields or 'no field'}",
                path=("loss", "labels"),
                hint="name the field of the labels in `[loss] labels`",
            )
        return batch[name]


def _fitting(output: Any, labels: Tensor) -> Tensor:
    """The output as logits; raises RunError naming what came instead."""
    if not isinstance(output, Tensor):
        raise RunError(
            "loss-output",
            f"cross-entropy needs a tensor of logits, but the last layer returned `{type(output).__name__}`",
            hint="let the last layer return its logits alone, or give a loss of your own through `factory`",
        )
    if not output.is_floating_point() or output.shape[:-1] != labels.shape:
        raise RunError(
            "loss-output",
            f"logits of shape {list(output.shape)} and {output.dtype} do not fit labels of shape {list(labels.shape)}",
            hint="logits are floating-point, shaped like the labels with the classes as the last dim",
        )
    return output

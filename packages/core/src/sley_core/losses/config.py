"""The table `[loss]` of core's losses. Imports no torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sley_core.table import Table


class CrossEntropyConfig(Table):
    """Cross-entropy over the last dim of the model's output, summed over the labels that count."""

    labels: str = "labels"
    """The batch field with the class of every position; for next-token prediction the data must have shifted it."""

    copying: bool = False
    """Whether labels may equal the tokens at their own positions; false refuses a first batch of such labels, since they were
    not shifted.
    """

    ignore_index: int = -100
    """The label of a position without a target, as is every negative label; such positions add neither loss nor weight."""

    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of the target that is spread evenly over all classes."""

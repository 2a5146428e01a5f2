"""The table `[loss]` of core's losses. Imports no torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sley_core.table import Table


class CrossEntropyConfig(Table):
    """Cross-entropy over the last dim of the model's output, summed over the labels that count."""

    labels: str = "labels"
    """The batch field that holds the class of every position; for next tokens it is shifted already."""

    copying: bool = False
    """Whether labels may be the tokens of their own places; false refuses a first batch of such: they were not shifted."""

    ignore_index: int = -100
    """The label that marks a position without a target, as every negative one does; it adds neither loss nor weight."""

    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of the target that is spread evenly over all classes."""

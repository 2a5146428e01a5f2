"""The tables of core's own records but the optimizers' and the data's, and their checks. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from sley_core.records import Problem
from sley_core.table import Fraction, Table

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan


class EachConfig(Table):
    """`core.each`: one all-reduce per parameter. The default, and the oracle of every other reducer."""


class GradientNormsConfig(Table):
    """`core.gradient_norms`: the norm of each parameter's gradient in every row, as `gradient_norm/NAME`."""


class KeepConfig(Table):
    """`core.keep`: every layer keeps the tensors of its backward."""


class RecomputeConfig(Table):
    """`core.recompute`: layers keep only their inputs and are recomputed in the backward."""

    fraction: Fraction = 1.0
    """The share of the model's blocks (all layers but the first and the last) that is recomputed, from the first on; rounded to
    a whole number of blocks, halves up.
    """


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


class JsonlConfig(Table):
    """One JSON object per optimizer step, in `metrics.jsonl` of the run's folder."""


def check_metrics(plan: Plan) -> Iterable[Problem]:
    """Yields a problem for each further listing of `core.jsonl`."""
    listed = [index for index, writer in enumerate(plan.metrics) if isinstance(writer.config, JsonlConfig)]
    for index in listed[1:]:
        name = plan.metrics[index].name
        yield Problem(("metrics", index), f"`{name}` is listed twice", "leave one out", "metrics-twice")

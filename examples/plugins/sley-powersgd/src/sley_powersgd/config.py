"""The table of `powersgd.reducer` in a plan."""

from __future__ import annotations

from pydantic import PositiveFloat, PositiveInt

from sley_core.api.plan import Table


class PowerSGDConfig(Table):
    """Sums low-rank approximations of gradients; the error of a step is added to the next step's gradients."""

    bucket_mb: PositiveFloat = 25.0
    """MiB of gradients in a bucket, whose factors are sent in one collective."""

    rank: PositiveInt = 4
    """Columns of the two factors of a matrix. More columns are more accurate and need more bytes."""

    start_step: PositiveInt = 1
    """The first step to compress, counted from 1 as in `metrics.jsonl`; earlier steps compute exact sums."""

    error_feedback: bool = True
    """Whether the error of a step is added to the next step's gradients, which needs memory for a copy of the gradients."""

"""The table of `powersgd.reducer` in a plan."""

from __future__ import annotations

from pydantic import PositiveFloat, PositiveInt

from sley_core.api.plan import Table


class PowerSGDConfig(Table):
    """Sums low-rank approximations of gradients; the error of a step is added to the next step's gradients."""

    bucket_mb: PositiveFloat = 25.0
    """MiB of gradients after which their factors are sent, in one collective."""

    rank: PositiveInt = 4
    """Columns of the two factors that are sent for a matrix; more columns are more accurate and larger."""

    start_step: PositiveInt = 1
    """The first step to compress, counted from 1 as in `metrics.jsonl`; earlier steps have exact sums."""

    error_feedback: bool = True
    """Keep the error of a step and add it to the next step's gradients; this takes a copy of the gradients."""

"""The tables of core's metrics writers. Imports no torch."""

from __future__ import annotations

from sley_core.plan.types import Table


class JsonlConfig(Table):
    """One JSON object per optimizer step, in `metrics.jsonl` of the run's folder."""

"""Refuses to run a plan that was resolved for other data; torch-free."""

from __future__ import annotations

from sley_core.data.config import DataConfig
from sley_core.records import Problem


def pin_problem(config: DataConfig, num_samples: int) -> Problem | None:
    """Returns the problem if the plan is pinned to another number of samples per epoch than `num_samples`, else None."""
    if config.samples_per_epoch in (None, num_samples):
        return None
    return Problem(
        ("data", "samples_per_epoch"),
        f"the data has {num_samples} samples per epoch, and this plan was made for {config.samples_per_epoch}",
        "the data has changed since; remove `samples_per_epoch` to train on what is there now",
        "data-changed",
    )

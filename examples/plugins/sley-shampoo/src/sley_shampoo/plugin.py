"""Defines the records of this package. Imports no torch, since plan checks import it."""

from __future__ import annotations

from sley_core.hookspecs import hookimpl
from sley_core.records import OptimizerRecord
from sley_shampoo.config import ShampooConfig


@hookimpl
def sley_records() -> list[OptimizerRecord]:
    return [OptimizerRecord(name="optimizer", config=ShampooConfig, build="sley_shampoo.optimizer:build", scope="per_matrix")]

"""Gives a plugin's tables their types, and its checks the plan; imports no torch."""

from sley_core.data.dataset import DataConfig
from sley_core.optim.config import OptimizerConfig
from sley_core.plan.plan import Plan
from sley_core.plan.tables import CheckpointConfig, ModelConfig, SequenceConfig
from sley_core.table import (
    Array,
    NonNegative,
    NonNegativeFloat,
    PlanPath,
    PlanPattern,
    Positive,
    PositiveFloat,
    RecordReference,
    Table,
)
from sley_core.topology import Topology
from sley_core.words import suggestion

__all__ = [
    "Array",
    "CheckpointConfig",
    "DataConfig",
    "ModelConfig",
    "NonNegative",
    "NonNegativeFloat",
    "OptimizerConfig",
    "Plan",
    "PlanPath",
    "PlanPattern",
    "Positive",
    "PositiveFloat",
    "RecordReference",
    "SequenceConfig",
    "Table",
    "Topology",
    "suggestion",
]

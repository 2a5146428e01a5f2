"""The field types of tables, and the plan for a plugin's checks. Imports no torch."""

from sley_core.data.dataset import DataConfig
from sley_core.errors import suggestion
from sley_core.optim.config import GroupConfig, OptimizerConfig
from sley_core.plan.plan import Component, Plan
from sley_core.plan.tables import CheckpointConfig, ModelConfig, SequenceConfig
from sley_core.table import Array, PartTable, PlanPath, PlanPattern, Table, ValueDescription
from sley_core.topology import Topology

__all__ = ["Array", "CheckpointConfig", "Component", "DataConfig", "GroupConfig", "ModelConfig", "OptimizerConfig", "PartTable"]
__all__ += ["Plan", "PlanPath", "PlanPattern", "SequenceConfig", "Table", "Topology", "ValueDescription", "suggestion"]

"""Field types for tables, and the plan for checks. Imports no torch."""

from sley_core.data.dataset import DataConfig as DataConfig
from sley_core.optim.config import GroupConfig as GroupConfig
from sley_core.optim.config import OptimizerConfig as OptimizerConfig
from sley_core.plan.plan import Component as Component
from sley_core.plan.plan import Plan as Plan
from sley_core.plan.tables import CheckpointConfig as CheckpointConfig
from sley_core.plan.tables import ModelConfig as ModelConfig
from sley_core.plan.tables import SequenceConfig as SequenceConfig
from sley_core.table import Array as Array
from sley_core.table import PartTable as PartTable
from sley_core.table import PlanPath as PlanPath
from sley_core.table import PlanPattern as PlanPattern
from sley_core.table import Table as Table
from sley_core.table import ValueDescription as ValueDescription
from sley_core.topology import Topology as Topology
from sley_core.words import suggestion as suggestion

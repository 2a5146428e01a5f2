"""The plan tables that name a record by `use` or the user's code by `factory`, in the order of a resolved plan."""

import re
from dataclasses import dataclass
from typing import Literal

from sley_core import records
from sley_core.data.dataset import DataConfig, FactoryDataConfig
from sley_core.optim.config import FactoryOptimizerConfig, OptimizerConfig
from sley_core.plan.tables import CheckpointConfig, FactoryTable, ModelConfig, SequenceConfig
from sley_core.table import Table

CONFIG_BASES: dict[type[records.Record], type[Table]] = {
    records.ModelRecord: ModelConfig,
    records.DatasetRecord: DataConfig,
    records.OptimizerRecord: OptimizerConfig,
    records.SequenceAttentionRecord: SequenceConfig,
    records.CheckpointerRecord: CheckpointConfig,
}
"""The required base class of a record's config, by the class of the record; `Table` for all other classes."""

RECORD_TYPE_NAMES: dict[type[records.Record], str] = {
    records.AdaptersRecord: "adapter",
    records.AveragingRecord: "averaging rule",
    records.LRScheduleRecord: "learning-rate schedule",
}
"""The names in messages of record classes whose names `record_type_name` cannot derive."""

CHECKPOINTER = "checkpoint.any_layout"
"""The full name of the record of the default checkpointer."""


class ModelFactory(ModelConfig, FactoryTable):
    """Your own model: a function that returns the layers. The function may have a parameter `data`."""


class DataFactory(FactoryDataConfig, FactoryTable):
    """Your own dataset: a function or class. It may have a parameter `context`, a `DataContext` (seed and split)."""


class LossFactory(FactoryTable):
    """Your own loss: a function or class that returns an object with `weight` and `loss`."""

    sequence: Literal["slices", "whole"] = "slices"
    """The input of the loss if ranks split each sequence (`parallel.sp`). "slices" passes this rank's slice, for a loss that is
    a sum over positions. "whole" passes whole sequences, for a loss that compares or averages positions; every rank then
    gathers the output, at a cost in memory.
    """


class LearningRateFactory(FactoryTable):
    """Your own learning rate: a function that returns another function, from the step (counted from 0) to the fraction of the
    full rate. The outer function may have a parameter `num_steps`, the number of steps of the run.
    """


class MetricsWriterFactory(FactoryTable):
    """Your own metrics writer: a function or class that returns an object with `write(row)` and `close()`. The function may
    have a parameter `folder`, the run's folder.
    """


@dataclass(frozen=True)
class ComponentTable:
    """Describes a table of the plan that names a record of the class `record_type`, or a factory. summary: what the part does.

    default: the name of the record that is used if the table has no `use` or the plan has no such table; None if the plan must
    name a record. factory: the model of a table with `factory`; None if factories are not allowed. factory_argument: the name
    of the argument that the run passes to a factory whose signature has it. build: `"module:attribute"` of `build(config,
    *args)`, which is called instead of the factory. is_list: whether the plan has an array `[[key]]` of these tables.
    required_table: the key of a table. If the plan lacks it, this table is not allowed, and its component is None. An optional
    table names itself.
    """

    key: str
    record_type: type[records.Record]
    summary: str
    default: str | None = None
    factory: type[Table] | None = None
    factory_argument: str | None = None
    build: str | None = None
    is_list: bool = False
    required_table: str | None = None

    @property
    def header(self) -> str:
        """The table's header in a plan: `[key]` or `[[key]]`."""
        return f"[[{self.key}]]" if self.is_list else f"[{self.key}]"


COMPONENTS = (  # in the order of a resolved plan
    ComponentTable("model", records.ModelRecord, "The layers to train.", factory=ModelFactory, factory_argument="data"),
    ComponentTable(
        "adapters",
        records.AdaptersRecord,
        "Small trainable parts that are added to the frozen layers of the model; by default the whole model is trained.",
        required_table="adapters",
    ),
    ComponentTable("data", records.DatasetRecord, "The samples to train on.", factory=DataFactory, factory_argument="context"),
    ComponentTable("loss", records.LossRecord, "The loss to minimise.", default="core.cross_entropy", factory=LossFactory),
    ComponentTable(
        "optimizer",
        records.OptimizerRecord,
        "The optimizer, which updates the weights in each step.",
        factory=FactoryOptimizerConfig,
        build="sley_core.optim.optimizers:build_from_factory",
    ),
    ComponentTable(
        "learning_rate",
        records.LRScheduleRecord,
        "The learning rate of each step.",
        default="core.constant",
        factory=LearningRateFactory,
        factory_argument="num_steps",
    ),
    ComponentTable(
        "averaging",
        records.AveragingRecord,
        "Averages of the weights over steps, for evaluations, saved weights and exports; by default none.",
        required_table="averaging",
    ),
    ComponentTable(
        "activations", records.ActivationPolicyRecord, "The tensors that a layer saves for its backward.", default="core.keep"
    ),
    ComponentTable(
        "pipeline",
        records.ScheduleRecord,
        "The order of each pipeline stage's actions; needed if `parallel.pp` is above 1.",
        required_table="pipeline",
    ),
    ComponentTable(
        "partition", records.PartitionerRecord, "How the layers are divided into pipeline stages.", required_table="pipeline"
    ),
    ComponentTable(
        "link",
        records.StageLinkRecord,
        "How outputs and their gradients are sent between pipeline stages.",
        required_table="pipeline",
    ),
    ComponentTable(
        "weights",
        records.WeightCommunicatorRecord,
        "How weights are sharded and gathered; needed if `parallel.wp` is above 1.",
        required_table="weights",
    ),
    ComponentTable(
        "sequence",
        records.SequenceAttentionRecord,
        "How attention works on slices of sequences; needed if `parallel.sp` is above 1.",
        required_table="sequence",
    ),
    ComponentTable(
        "gradient_handlers",
        records.GradientHandlerRecord,
        "What is done with accumulated gradients, in the order of the list on every rank. By default, `core.each` if several "
        "ranks may hold the same weight, and in a pipeline also the schedule's handler for weights that stages share.",
        is_list=True,
    ),
    ComponentTable(
        "scheduler_hooks", records.SchedulerHookRecord, "Hooks that observe every action; by default none.", is_list=True
    ),
    ComponentTable(
        "offload",
        records.OffloadManagerRecord,
        "Which parts of the run's memory are offloaded, and when; by default none.",
        is_list=True,
    ),
    ComponentTable(
        "checkpoint",
        records.CheckpointerRecord,
        "How and when a run saves checkpoints; by default only when a program asks for it.",
        default=CHECKPOINTER,
        required_table="checkpoint",
    ),
    ComponentTable(
        "metrics",
        records.MetricsWriterRecord,
        "Where the metrics of each step are written; by default `core.jsonl`. A list replaces the default.",
        is_list=True,
        factory=MetricsWriterFactory,
        factory_argument="folder",
    ),
)


def record_type_name(record_type: type[records.Record]) -> str:
    """Returns the name that messages use for a class of records, such as "gradient handler"."""
    words = re.findall("[A-Z][a-z]+", record_type.__name__.removesuffix("Record"))
    return RECORD_TYPE_NAMES.get(record_type, " ".join(words).lower())

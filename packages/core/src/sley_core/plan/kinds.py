"""The plan tables that name a record by `use` or the user's code by `factory`, in the order of a resolved plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sley_core import records
from sley_core.data.dataset import DataConfig, FactoryDataConfig
from sley_core.optim.config import FactoryOptimizerConfig, OptimizerConfig
from sley_core.plan.tables import CheckpointConfig, FactoryTable, ModelConfig, SequenceConfig
from sley_core.table import RecordKind, Table

RECORDS: dict[RecordKind, type[records.Record]] = {
    "models": records.ModelRecord,
    "adapters": records.AdaptersRecord,
    "datasets": records.DatasetRecord,
    "losses": records.LossRecord,
    "optimizers": records.OptimizerRecord,
    "lr_schedules": records.LRScheduleRecord,
    "averaging_rules": records.AveragingRecord,
    "partitioners": records.PartitionerRecord,
    "schedules": records.ScheduleRecord,
    "stage_links": records.StageLinkRecord,
    "gradient_handlers": records.GradientHandlerRecord,
    "scheduler_hooks": records.SchedulerHookRecord,
    "weight_communicators": records.WeightCommunicatorRecord,
    "sequence_attentions": records.SequenceAttentionRecord,
    "activation_policies": records.ActivationPolicyRecord,
    "offload_managers": records.OffloadManagerRecord,
    "checkpointers": records.CheckpointerRecord,
    "metrics_writers": records.MetricsWriterRecord,
}
"""The record class of each kind."""

BASES: dict[RecordKind, type[Table]] = {
    "models": ModelConfig,
    "datasets": DataConfig,
    "optimizers": OptimizerConfig,
    "sequence_attentions": SequenceConfig,
    "checkpointers": CheckpointConfig,
}
"""The required base class of a record's config, by kind; the default is `Table`."""

KIND_NAMES: dict[RecordKind, str] = {"lr_schedules": "learning-rate schedule", "losses": "loss"}


CHECKPOINTER = "checkpoint.any_layout"
"""The default checkpointer."""


class ModelFactory(ModelConfig, FactoryTable):
    """Your own model: a function that returns the layers. The function may have a parameter `data`."""


class DataFactory(FactoryDataConfig, FactoryTable):
    """Your own dataset: a function or class. It may have a parameter `context` (seed, split)."""


class LossFactory(FactoryTable):
    """Your own loss: a function or class that returns an object with `weight` and `loss`."""

    sequence: Literal["slices", "whole"] = "slices"
    """The input of the loss if ranks split each sequence (`parallel.sp`). "slices" passes this rank's slice to a loss that is a
    sum over positions. "whole" passes whole sequences to a loss that compares or averages positions; every rank gathers the
    output, which needs memory.
    """


class RateFactory(FactoryTable):
    """Your own learning rate: a function that returns a function from the step, counted from 0, to the share of the full rate.
    The outer function may have a parameter `num_steps`.
    """


class WriterFactory(FactoryTable):
    """Your own writer: a function or class that returns an object with `write(row)` and `close()`. It may have a parameter
    `folder`, the run's folder.
    """


@dataclass(frozen=True)
class ComponentTable:
    """Describes a plan table that names a record or factory.

    default: the record of a table without `use`, or of a plan without the table; None if the plan must name a record.
    factory: the model of a table with `factory`; None if factories are not allowed. factory_argument: the name of the run's
    argument that is passed to a factory whose signature has it. build: `build(config, *args)`, which replaces the call of the
    factory. is_list: whether the plan has an array `[[key]]` of these tables. required_table: the table without which this
    table is not allowed; an optional table names itself. schedule_default: the default if the schedule's record names none.
    """

    key: str
    kind: RecordKind
    summary: str
    default: str | None = None
    factory: type[Table] | None = None
    factory_argument: str | None = None
    build: str | None = None
    is_list: bool = False
    required_table: str | None = None
    schedule_default: str | None = None

    @property
    def header(self) -> str:
        """The table's header in a plan: `[key]` or `[[key]]`."""
        return f"[[{self.key}]]" if self.is_list else f"[{self.key}]"


COMPONENTS = (
    ComponentTable("model", "models", "The layers to train.", factory=ModelFactory, factory_argument="data"),
    ComponentTable(
        "adapters",
        "adapters",
        "Small trainable parts that are added to the frozen layers of the model; by default the whole model is trained.",
        required_table="adapters",
    ),
    ComponentTable("data", "datasets", "The samples to train on.", factory=DataFactory, factory_argument="context"),
    ComponentTable("loss", "losses", "The loss to minimise.", default="core.cross_entropy", factory=LossFactory),
    ComponentTable(
        "optimizer",
        "optimizers",
        "The optimizer, which updates the weights in each step.",
        factory=FactoryOptimizerConfig,
        build="sley_core.optim.build:build_from_factory",
    ),
    ComponentTable(
        "learning_rate",
        "lr_schedules",
        "The learning rate of each step.",
        default="core.constant",
        factory=RateFactory,
        factory_argument="num_steps",
    ),
    ComponentTable(
        "averaging",
        "averaging_rules",
        "Averages of the weights over steps, for evaluations, saved weights and exports; by default none.",
        required_table="averaging",
    ),
    ComponentTable(
        "activations", "activation_policies", "The tensors that a layer saves for its backward.", default="core.keep"
    ),
    ComponentTable(
        "pipeline",
        "schedules",
        "The order of each pipeline stage's actions; needed if `parallel.pp` is above 1.",
        required_table="pipeline",
    ),
    ComponentTable(
        "partition",
        "partitioners",
        "How the layers are divided into pipeline stages.",
        required_table="pipeline",
        schedule_default="pp.balanced",
    ),
    ComponentTable(
        "link",
        "stage_links",
        "How outputs and their gradients are sent between pipeline stages.",
        required_table="pipeline",
        schedule_default="pp.link",
    ),
    ComponentTable(
        "weights",
        "weight_communicators",
        "How weights are sharded and gathered; needed if `parallel.wp` is above 1.",
        required_table="weights",
    ),
    ComponentTable(
        "sequence",
        "sequence_attentions",
        "How attention works on slices of sequences; needed if `parallel.sp` is above 1.",
        required_table="sequence",
    ),
    ComponentTable(
        "gradient_handlers",
        "gradient_handlers",
        "What is done with accumulated gradients, in the order of the list on every rank. By default, `core.each` if several "
        "ranks may hold the same weight, and in a pipeline also the schedule's handler for weights that stages share.",
        is_list=True,
    ),
    ComponentTable("scheduler_hooks", "scheduler_hooks", "Hooks that observe every action; by default none.", is_list=True),
    ComponentTable(
        "offload", "offload_managers", "Which parts of the run's memory are offloaded, and when; by default none.", is_list=True
    ),
    ComponentTable(
        "checkpoint",
        "checkpointers",
        "How and when a run saves checkpoints; by default only when a program asks for it.",
        default=CHECKPOINTER,
        required_table="checkpoint",
    ),
    ComponentTable(
        "metrics",
        "metrics_writers",
        "Where the metrics of each step are written; by default `core.jsonl`. A list replaces the default.",
        is_list=True,
        factory=WriterFactory,
        factory_argument="folder",
    ),
)


def kind_name(kind: RecordKind) -> str:
    """Returns the singular of a kind for messages, such as "gradient handler"."""
    return KIND_NAMES.get(kind, kind.replace("_", " ").removesuffix("s").replace("policie", "policy"))


def kind_with_article(kind: RecordKind) -> str:
    """Returns the singular of a kind with its article, such as "an optimizer"."""
    name = kind_name(kind)
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"

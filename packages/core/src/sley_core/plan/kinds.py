"""The tables of a plan that name a record (`use`) or the user's own code (`factory`), in the order of a resolved plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sley_core import records
from sley_core.data.dataset import DataConfig, FactoryDataConfig
from sley_core.optim.config import FactoryOptimizerConfig, OptimizerConfig
from sley_core.plan.tables import CheckpointConfig, Factory, ModelConfig, SequenceConfig
from sley_core.table import NAMED_TABLES, RecordKind, Table

RECORDS: dict[RecordKind, type[records.Record]] = {
    "models": records.ModelRecord,
    "adapters": records.AdaptersRecord,
    "datasets": records.DatasetRecord,
    "losses": records.LossRecord,
    "optimizers": records.OptimizerRecord,
    "lr_schedules": records.LRScheduleRecord,
    "partitioners": records.PartitionerRecord,
    "schedules": records.ScheduleRecord,
    "stage_links": records.StageLinkRecord,
    "gradient_handlers": records.GradientHandlerRecord,
    "scheduler_hooks": records.SchedulerHookRecord,
    "weight_communicators": records.WeightCommunicatorRecord,
    "sequence_attentions": records.SequenceAttentionRecord,
    "memory_pools": records.MemoryPoolRecord,
    "activation_policies": records.ActivationPolicyRecord,
    "offload_managers": records.OffloadManagerRecord,
    "checkpointers": records.CheckpointerRecord,
    "metrics_writers": records.MetricsWriterRecord,
}
"""The class of the records of each kind."""

BASES: dict[RecordKind, type[Table]] = {
    "models": ModelConfig,
    "datasets": DataConfig,
    "optimizers": OptimizerConfig,
    "sequence_attentions": SequenceConfig,
    "checkpointers": CheckpointConfig,
}
"""The base class of a record's config, by kind; records of other kinds take any `Table`."""

KIND_NAMES: dict[RecordKind, str] = {"lr_schedules": "learning-rate schedule", "losses": "loss"}


CHECKPOINTER = "checkpoint.any_layout"
"""What saves a run whose plan names nothing else."""


class ModelFactory(ModelConfig, Factory):
    """A model of your own: a function that returns its layers; it is given `data` too, if it names it."""


class DataFactory(FactoryDataConfig, Factory):
    """A dataset of your own; the function or class is given `context` (seed, split) too, if it names it."""


class LossFactory(Factory):
    """A loss of your own: a function or class that gives an object with `weight` and `loss`."""

    sequence: Literal["slices", "whole"] = "slices"
    """What the loss is given if ranks split each sequence (`parallel.sp`): this rank's slice, of which it is a sum over
    positions; or whole sequences, for a loss that compares or averages positions: the output is gathered on every rank, which
    needs the memory.
    """


class RateFactory(Factory):
    """A learning rate of your own: a function that gives a function from the step, 0 at first, to the share of the full rate;
    it is given `num_steps` too, if it names it.
    """


class WriterFactory(Factory):
    """A writer of your own: a function or class that gives an object with `write(row)` and `close()`; it is given `folder`, the
    run's, too, if it names it.
    """


@dataclass(frozen=True)
class ComponentTable:
    """Describes one table whose content a record or factory decides.

    default: the record if the table or its `use` is left out; None if one must be named. factory: the model of the table if it
    has `factory`; None if only records are allowed. given: the keyword under which a factory receives what it is built with, if
    its signature has it. build: function that calls the factory instead of core: `build(config, *args)`. many: whether the plan
    has a list of them, `[[key]]`. only_with: the table is allowed only together with this one; an optional table names itself.
    known: if the schedule's record gives the default, under this table's key: a record of Sley's own, for hints.
    """

    key: str
    kind: RecordKind
    summary: str
    default: str | None = None
    factory: type[Table] | None = None
    given: str | None = None
    build: str | None = None
    many: bool = False
    only_with: str | None = None
    known: str | None = None

    @property
    def named(self) -> bool:
        """Whether the plan has tables of it by name, `[key.NAME]`."""
        return NAMED_TABLES.get(self.kind) == self.key

    @property
    def header(self) -> str:
        """The table's header in a plan: `[key]`, `[[key]]` for a list, or `[key.NAME]`."""
        if self.named:
            return f"[{self.key}.NAME]"
        return f"[[{self.key}]]" if self.many else f"[{self.key}]"


COMPONENTS = (
    ComponentTable("model", "models", "The layers to train.", factory=ModelFactory, given="data"),
    ComponentTable(
        "adapters",
        "adapters",
        "Small trainable parts that are added to the layers of the model, which is frozen; left out, all of it is trained.",
        only_with="adapters",
    ),
    ComponentTable("data", "datasets", "The samples to train on.", factory=DataFactory, given="context"),
    ComponentTable("loss", "losses", "The loss to minimise.", default="core.cross_entropy", factory=LossFactory),
    ComponentTable(
        "optimizer",
        "optimizers",
        "How a step changes the weights.",
        factory=FactoryOptimizerConfig,
        build="sley_core.optim.build:build_from_factory",
    ),
    ComponentTable(
        "learning_rate",
        "lr_schedules",
        "The learning rate from step to step.",
        default="core.constant",
        factory=RateFactory,
        given="num_steps",
    ),
    ComponentTable("activations", "activation_policies", "What a layer keeps for its backward.", default="core.keep"),
    ComponentTable(
        "pipeline",
        "schedules",
        "The order of each pipeline stage's actions; needed if `parallel.pp` is above 1.",
        only_with="pipeline",
    ),
    ComponentTable(
        "partition", "partitioners", "How the layers are cut into pipeline stages.", only_with="pipeline", known="pp.balanced"
    ),
    ComponentTable(
        "link",
        "stage_links",
        "What carries outputs and their gradients from one pipeline stage to the next.",
        only_with="pipeline",
        known="pp.link",
    ),
    ComponentTable(
        "weights",
        "weight_communicators",
        "How weights are sharded and gathered; needed if `parallel.wp` is above 1.",
        only_with="weights",
    ),
    ComponentTable(
        "sequence",
        "sequence_attentions",
        "How attention works on sequences in slices; needed if `parallel.sp` is above 1.",
        only_with="sequence",
    ),
    ComponentTable(
        "gradient_handlers",
        "gradient_handlers",
        "What is done with accumulated gradients; this order is the order of collectives on every rank. Left out: "
        "`core.each` if more than one rank may hold the same weight, and then, in a pipeline, the handler that the "
        "schedule names for weights that stages share.",
        many=True,
    ),
    ComponentTable(
        "scheduler_hooks", "scheduler_hooks", "What is called before and after every action; left out, nothing.", many=True
    ),
    ComponentTable("offload", "offload_managers", "What may be offloaded, and when; left out, nothing.", many=True),
    ComponentTable(
        "pools",
        "memory_pools",
        "Pools of buffers, by names of your own, for the key `pool` of other tables: tables with the same name share a pool. "
        "If such a key has a record's name, it is a pool with that record's defaults, shared in the same way.",
    ),
    ComponentTable(
        "checkpoint",
        "checkpointers",
        "How and when a run saves checkpoints; left out, only when a program asks for it.",
        default=CHECKPOINTER,
        only_with="checkpoint",
    ),
    ComponentTable(
        "metrics",
        "metrics_writers",
        "Where the numbers of each step are written; left out, `core.jsonl`. A list replaces it: name it too to keep it.",
        many=True,
        factory=WriterFactory,
        given="folder",
    ),
)


def kind_name(kind: RecordKind) -> str:
    """Returns a kind in the singular, for messages: "gradient handler"."""
    return KIND_NAMES.get(kind, kind.replace("_", " ").removesuffix("s").replace("policie", "policy"))


def kind_with_article(kind: RecordKind) -> str:
    """Returns a kind in the singular with its article: "an optimizer"."""
    word = kind_name(kind)
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"

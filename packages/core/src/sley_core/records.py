"""The results of a plugin's hooks: small frozen records that describe its parts, without building them.

A record names a thing (`each` of plugin `core` is `core.each` in a plan), the model of its table, and where the live object
comes from: `build` is a `"module:attribute"` string that is imported only when a plan uses the record. So listing records does
not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

from sley_core.table import Table

Role = Literal["reducer", "tie", "transform", "observer"]
Scope = Literal["elementwise", "per_matrix", "global"]


def named(name: str) -> Any:
    """Returns the object `"module:attribute"`; imports the module."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


@dataclass(frozen=True, kw_only=True)
class Record:
    """A part that a plan can name.

    name: unique among the plugin's records of the same class.
    config: the pydantic model of its table, without the key `use`.
    build: `"module:attribute"`; the record's class gives its arguments.
    """

    name: str
    config: type[Table]
    build: str
    summary: str = ""

    def load(self, what: str | None = None) -> Any:
        """Returns the object that the string `what` of this record names, by default `build`; imports its module.

        Raises ImportError or AttributeError as Python does; the loader adds the plugin's name.
        """
        return named(what or self.build)


@dataclass(frozen=True, kw_only=True)
class ModelRecord(Record):
    """`build(config, data: DataInfo) -> layers`: a list of modules or of (name, module) pairs, made on meta.

    exports: by format of `train-cli export`, beside "safetensors": `"module:attribute"` of
        `export(plan, source, out, max_file_bytes) -> list[str]`, which writes the weights of `source` (`api.files.Tensors`)
        into the new folder `out` and returns the names of its files.
    names_are_own: whether the weights have no other names than those of their layers, so that an export need not make the
        model.
    """

    exports: Mapping[str, str] = field(default_factory=dict)
    names_are_own: bool = False


@dataclass(frozen=True, kw_only=True)
class DatasetRecord(Record):
    """`build(config, context: DataContext) -> Dataset` (see `api.data`).

    Each of the others is `"module:attribute"` of a function, or None:

    check: `check(config, *, evaluates, vocab_size) -> Iterable[Problem]` finds faults of the table and its files
        before any process starts, without torch. evaluates: whether held-out data is needed. vocab_size: that of the
        model, None if it is not known.
    text_ids: `text_ids(config, tokenizer: Path | None) -> api.data.TextIds` converts text to token ids and back, for `train-cli
        sample`. tokenizer: is used in place of the table's.
    trained_on: `trained_on(own, evaluated) -> str` says in words which held-out data of the table `evaluated` a run on the
        table `own` is trained on; "" if it is none.
    rows: `rows(config, split) -> api.data.DataRows` reads a split without torch, for `train-cli data show`.
    """

    check: str | None = None
    text_ids: str | None = None
    trained_on: str | None = None
    rows: str | None = None


@dataclass(frozen=True, kw_only=True)
class LossRecord(Record):
    """`build(config) -> Loss` (see `protocols.Loss`).

    split_logits: whether its `loss` also accepts `protocols.SplitLogits`, for ranks that share the classes.
    sequence: "whole" for a loss that needs whole sequences where ranks have slices of them; they are gathered for it.
    """

    split_logits: bool = False
    sequence: Literal["slices", "whole"] = "slices"


@dataclass(frozen=True, kw_only=True)
class OptimizerRecord(Record):
    """`build(config, groups, device) -> torch.optim.Optimizer`.

    scope: the gradients that an element's update depends on: its own, its parameter's or all; `check` compares it with how the
    layout cuts the weights.
    """

    scope: Scope = "elementwise"


class LRScheduleRecord(Record):
    """`build(config, num_steps) -> Callable[[int], float]`: the factor on every group's `lr` at step 0, 1, ..."""


@dataclass(frozen=True, kw_only=True)
class PartitionerRecord(Record):
    """`build(config) -> (costs, num_chunks) -> boundaries`.

    timer: `"module:attribute"` of a function `timer(plan, world, draft, dtype) -> list[float]` that measures the seconds of a
        forward and backward of each layer, equal on all ranks of `world`. `draft(info) -> Model` makes the model on meta;
        `dtype` is that of the working weights. The result is then called with these seconds, in place of each layer's number
        of parameters. The config has a key `layer_costs`, None by default: only then does the run call the timer; it writes
        the seconds into the plan in its folder.
    """

    timer: str | None = None


@dataclass(frozen=True, kw_only=True)
class ScheduleRecord(Record):
    """`build(config) -> Schedule` (see `sley_core.actions.action`).

    What a plan uses with it if the plan does not say, each by a record's name (`"pp.link"`), of this plugin or of another:
    link: the stage link; None takes the only one that the plan's plugins have.
    partition: the partitioner; None also takes the only one.
    ties: the gradient handler that sums the gradients of parameters on several stages; None takes none.
    """

    link: str | None = None
    partition: str | None = None
    ties: str | None = None


class StageLinkRecord(Record):
    """`build(config) -> StageLink`."""


@dataclass(frozen=True, kw_only=True)
class GradientHandlerRecord(Record):
    """`build(config) -> GradientHandler`.

    role: a reducer sums over the reduce group, a tie over the holders of a shared parameter, a transform changes gradients, an
        observer only reads them.
    result: of a reducer on this rank, the full sum or a shard of it.
    exact: whether the result is the exact sum; else `tolerance` is the relative error that its contract test allows.
    tolerance_of: computes the tolerance from the table, if it depends on that; 0.0 if the result is then the exact sum.
    takes_shards: whether it also works after a reducer whose result is a shard. It then reads `store.part` instead of
        `store.gradient`, and calls `parts.weights.settle` before it reads a weight, part of which may still be in flight.
    fixed_order: whether a plan may ask for a fixed order of sums: a reducer's come from `parts.store.reduction.sums`, others
        need no order.
    before, after: roles that this handler must precede or follow in the plan's list.
    """

    role: Role
    result: Literal["full", "shard"] = "full"
    takes_shards: bool = False
    exact: bool = True
    tolerance: float = 0.0
    tolerance_of: Callable[[Any], float] | None = None
    fixed_order: bool = False
    before: tuple[Role, ...] = ()
    after: tuple[Role, ...] = ()

    def tolerance_with(self, config: Table) -> float:
        """Returns the relative error that is allowed with the table `config`; 0.0 for a result that is the exact sum."""
        if self.tolerance_of is not None:
            return self.tolerance_of(config)
        return 0.0 if self.exact else self.tolerance


class SchedulerHookRecord(Record):
    """`build(config, parts: Parts) -> SchedulerHook`."""


@dataclass(frozen=True, kw_only=True)
class WeightCommunicatorRecord(Record):
    """`build(config) -> WeightCommunicator`.

    fixed_order: whether a plan may ask for a fixed order of sums: it then passes the gradient of each of the micro-batches
        `parts.store.reduction.concurrent_micros(group)` to `store.add_micros`.
    """

    fixed_order: bool = False


class SequenceAttentionRecord(Record):
    """`build(config, group) -> SequenceCommunicator`; group: the ranks that hold the slices of the same samples."""


class MemoryPoolRecord(Record):
    """`build(config) -> MemoryPool`."""


@dataclass(frozen=True, kw_only=True)
class OffloadManagerRecord(Record):
    """`build(config) -> OffloadManager`.

    parts: the parts of a run's memory that it moves with the table `config`; two managers of a plan must not share any.
    scope: the widest optimizer scope (`OptimizerRecord.scope`) that its way of stepping supports.
    steps_on_host: whether masters and optimizer states are created on the host, where it steps them, through
        `parts.events.step_in_buckets`.
    """

    steps_on_host: bool = False
    parts: Callable[[Any], Sequence[str]]
    scope: Callable[[Any], Scope] = lambda config: "global"


class ActivationPolicyRecord(Record):
    """`build(config, layer_names) -> ActivationPolicy`."""


def steps_on_host(record: Record | None) -> bool:
    """Returns whether `record` is of an offload manager under which the optimizer steps on the host."""
    return isinstance(record, OffloadManagerRecord) and record.steps_on_host


class MetricsWriterRecord(Record):
    """`build(config, folder: Path) -> MetricsWriter`, on rank 0 only."""


@dataclass(frozen=True, kw_only=True)
class CheckpointerRecord(Record):
    """`build(config, state: TrainingState) -> Checkpointer` (`sley_core.api.state`). config: None for a run whose plan has no
    table `[checkpoint]`: it saves and loads only when a program asks.

    files: `"module:attribute"` of a class of `protocols.CheckpointFiles`, by which the command line resumes, exports and
    samples; None if only runs can read its checkpoints.
    keeps_best: whether it keeps the newest checkpoint whose description `is_best`, beside those that it keeps anyway, for
    `[evaluation] keep_best`.
    """

    files: str | None = None
    keeps_best: bool = False


@dataclass(frozen=True)
class ProcessGroupRecord:
    """An extra group: core makes it on all ranks, in plan order, and provides it as `run.groups[axis]`.

    attaches: whether its transports may read the memory of ranks on the same host (`[parallel] cross_memory_attach`).
    """

    axis: str
    ranks: tuple[tuple[int, ...], ...]
    lanes: tuple[str, ...] = ("main",)
    attaches: bool = False


@dataclass(frozen=True, kw_only=True)
class TransportRecord:
    """A transport for CPU ranks in place of gloo's messages. An entry point of the group `sley.transports` names it; a package
    that brings one is found by being installed, and used by plans that leave `[parallel] cross_memory_attach` on.

    connect: `"module:attribute"` of `connect(members, lanes, timeout_s) -> dict[str, Transport]`, a collective of the group
        `members`: a transport by name for each of `lanes` (torch's process groups by name), or {} on all ranks alike where
        they cannot reach each other so. timeout_s: of every wait.
    scratch: `"module:attribute"` of `scratch(own) -> object`, which takes the memory that summing the peers' parts of `own`
        takes, for estimates; None if that is none.
    """

    name: str
    connect: str
    scratch: str | None = None

    def load(self, what: str) -> Any:
        """Returns the object that the string `what` of this record names; imports its module."""
        return named(what)


@dataclass(frozen=True)
class Problem:
    """Reports one problem of a plan, yielded by `sley_check_plan`; core adds file, line and column."""

    path: tuple[str | int, ...]
    message: str
    hint: str | None = None
    code: str = "plan-invalid"

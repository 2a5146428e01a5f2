"""What a plugin's hooks return: small frozen records that say what there is, without building it.

A record names a thing (`each` of plugin `core` is `core.each` in a plan), the model of its table, and where the live object
comes from: `build` is a `"module:attribute"` string that is imported only when a plan uses the record. Listing records
therefore costs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

from sley_core.table import Table

Role = Literal["reducer", "tie", "transform", "observer"]
Scope = Literal["elementwise", "per_matrix", "global"]

AS_IT_IS: tuple[Mapping[str, Any], ...] = ({},)
"""The `variants` of a record that a search tries with its defaults alone."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """Something that a plan can name.

    name: unique among the plugin's records of the same hook.
    config: the pydantic model of its table, without the key `use`.
    build: `"module:attribute"`; what it is called with stands in the hook's docstring.
    variants: the tables, without `use`, with which `train-cli search` tries it where a plan leaves the choice open; `({},)` is
        one with its defaults. Without any it is taken only where the plan names it.
    """

    name: str
    config: type[Table]
    build: str
    summary: str = ""
    variants: tuple[Mapping[str, Any], ...] = ()

    def load(self) -> Any:
        """The object that `build` names; imports its module.

        Raises ImportError or AttributeError as Python does; the loader names the plugin.
        """
        module, _, attribute = self.build.partition(":")
        return getattr(import_module(module), attribute)


class ModelRecord(Record):
    """`build(config, data: DataInfo) -> layers`: a list of modules or of (name, module) pairs, made on meta."""


class DatasetRecord(Record):
    """`build(config, context: DataContext) -> Dataset` (see `sley_core.data.dataset`)."""


@dataclass(frozen=True, kw_only=True)
class LossRecord(Record):
    """`build(config) -> Loss` (see `protocols.Loss`).

    split_logits: whether its `loss` takes `protocols.SplitLogits` too, for ranks that share the classes.
    """

    split_logits: bool = False


@dataclass(frozen=True, kw_only=True)
class OptimizerRecord(Record):
    """`build(config, groups, device) -> torch.optim.Optimizer`.

    scope: what an update of one element depends on; `check` compares it with how the layout cuts the weights.
    """

    scope: Scope = "elementwise"


class LRScheduleRecord(Record):
    """`build(config, num_steps) -> Callable[[int], float]`: the factor on every group's `lr` at step 0, 1, ..."""


@dataclass(frozen=True, kw_only=True)
class PartitionerRecord(Record):
    """`build(config) -> (costs, num_chunks) -> boundaries`.

    costs: what of each layer the result is called with: its parameters, or the seconds of a timed forward and backward. For
        seconds the config has a key `layer_costs`, None by default: the run times the layers where it is None, and puts
        what it found there in the plan of its folder.
    """

    costs: Literal["parameters", "seconds"] = "parameters"


@dataclass(frozen=True, kw_only=True)
class ScheduleRecord(Record):
    """`build(config) -> Schedule` (see `sley_core.actions.schedule`).

    What a plan takes beside it where it does not say, each by a record's name (`"pp.link"`), of this plugin or of another:
    link: what carries outputs and gradients between stages; None takes the only one that the plan's plugins have.
    partition: how layers are cut into parts; None takes the only one, too.
    ties: the gradient handler that sums what several stages hold; None takes none.
    """

    link: str | None = None
    partition: str | None = None
    ties: str | None = None


class StageLinkRecord(Record):
    """`build(config) -> StageLink`."""


@dataclass(frozen=True, kw_only=True)
class GradientHandlerRecord(Record):
    """`build(config) -> GradientHandler`.

    role: reducer sums over the reduce group, tie over the holders of a shared parameter, transform changes gradients,
        observer only looks.
    result: what a reducer leaves to this rank, the full sum or a shard of it.
    exact: whether the result is the sum itself; else `tolerance` is the relative error that its contract test allows.
    tolerance_of: where the table decides: its tolerance, 0.0 if the result is then the sum itself.
    takes_shards: whether it also works behind a reducer whose result is a shard. It then reads `store.part` in place of
        `store.gradient`, and calls `parts.weights.settle` before it reads a weight, of which a part may be on its way.
    canonical: whether its sums are those of `TreeSums` where `parts.store.canonical` is there, or have no order.
    plain_sums: of a reducer, whether with the table `config` it exchanges each gradient once a step, over all that share the
        weight and in the type in which it is accumulated: one sum, or, where its result is a shard, one reduction and one
        gather of the weight. Only then can a search tell its seconds at a glance, and takes it.
    before, after: roles that this handler must precede or follow in the plan's list.
    """

    role: Role
    result: Literal["full", "shard"] = "full"
    takes_shards: bool = False
    exact: bool = True
    tolerance: float = 0.0
    tolerance_of: Callable[[Any], float] | None = None
    canonical: bool = False
    plain_sums: Callable[[Any], bool] = field(default=lambda config: False, compare=False)
    before: tuple[Role, ...] = ()
    after: tuple[Role, ...] = ()

    def tolerance_with(self, config: Table) -> float:
        """The relative error that is allowed with the table `config`; 0.0 for a result that is the sum itself."""
        if self.tolerance_of is not None:
            return self.tolerance_of(config)
        return 0.0 if self.exact else self.tolerance


class SchedulerHookRecord(Record):
    """`build(config, run) -> SchedulerHook`."""


@dataclass(frozen=True, kw_only=True)
class WeightCommunicatorRecord(Record):
    """`build(config) -> WeightCommunicator`.

    canonical: whether it keeps the gradients of micro-batches apart where `parts.store.canonical` is there, and gives each to
    `store.add_of_micros`.
    reduces: how often it reduces gradients with the table `config`, if beside that it gathers the sharded weights of each layer
        once in front of every forward, and once in front of every backward, while the layer before computes. Only then can a
        search tell its seconds at a glance, and takes it; None for any other.
    """

    canonical: bool = False
    reduces: Callable[[Any], Literal["micro_batch", "step"] | None] = field(default=lambda config: None, compare=False)


@dataclass(frozen=True, kw_only=True)
class SequenceAttentionRecord(Record):
    """`build(config, group) -> SequenceCommunicator`; group: the ranks that hold the slices of the same samples.

    swaps: whether all that it exchanges is one swap of queries, keys and values before an attention and one of its output
        behind it, and in the backward as much again. Only then can a search tell its seconds at a glance, and takes it.
    """

    swaps: bool = False


class MemoryPoolRecord(Record):
    """`build(config) -> MemoryPool`."""


@dataclass(frozen=True, kw_only=True)
class OffloadManagerRecord(Record):
    """`build(config) -> OffloadManager`.

    parts: the parts of a run's memory that it moves with the table `config`; two managers of a plan move none in common.
    scope: what an update of one element may depend on, at most, for its way of stepping the optimizer.
    steps_on_host: masters and optimizer states are made on the host, and it steps them there, through
        `parts.events.step_in_buckets`.
    swaps: whether, with the table `config`, optimizer states are away between all steps, and here only while their weights are
        stepped; False for a manager that moves memory by call alone. A search leaves managers out that say None.
    """

    steps_on_host: bool = False
    swaps: Callable[[Any], bool | None] = field(default=lambda config: None, compare=False)
    parts: Callable[[Any], Sequence[str]]
    scope: Callable[[Any], Scope] = lambda config: "global"


@dataclass(frozen=True, kw_only=True)
class ActivationPolicyRecord(Record):
    """`build(config, layer_names) -> ActivationPolicy`.

    copies: whether what the layers of its attribute `names` save for their backward is copied to the host after their forward,
        and back before their backward.
    """

    copies: bool = False


class MetricsWriterRecord(Record):
    """`build(config, folder: Path) -> MetricsWriter`, on rank 0 only."""


@dataclass(frozen=True)
class ProcessGroupRecord:
    """An extra group: core makes it on all ranks, in plan order, and gives it as `run.groups[axis]`.

    attaches: whether its transports may read the memory of ranks on the same host (`[parallel] cross_memory_attach`).
    """

    axis: str
    ranks: tuple[tuple[int, ...], ...]
    lanes: tuple[str, ...] = ("main",)
    attaches: bool = False


@dataclass(frozen=True)
class Problem:
    """What `sley_check_plan` yields: core adds file, line and column."""

    path: tuple[str | int, ...]
    message: str
    hint: str | None = None
    code: str = "plan-invalid"

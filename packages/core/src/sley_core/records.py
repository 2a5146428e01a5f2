"""The records that a plugin's hooks return. A record is a small frozen description of a part that a plan can use.

A record has a name, the pydantic model of its table, and a string `"module:attribute"` that names the code. In a plan, the
record `each` of the plugin `core` is called `core.each`. The code is imported only when a plan uses the record, so listing
records does not import torch.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sley_core.errors import KeyPath, PlanError, SleyError, format_cause, suggestion
from sley_core.table import Table

Role = Literal["reducer", "tie", "transform", "observer"]
"""What a gradient handler does (see `GradientHandlerRecord`)."""

Scope = Literal["elementwise", "per_matrix", "global"]
"""The gradients on which the update of an element depends (see `OptimizerRecord`)."""


def import_object(name: str) -> Any:
    """Imports and returns the object `name`, which has the form `"module:attribute"`."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


@dataclass(frozen=True, kw_only=True)
class Record:
    """Describes a part that a plan can name.

    name: a name that is unique among the plugin's records of the same class.
    config: the pydantic model of the part's table, without the `use` key.
    build: `"module:attribute"` of the builder. Each subclass documents the builder's arguments.
    """

    name: str
    config: type[Table]
    build: str

    def load(self, target: str | None = None) -> Any:
        """Imports and returns the object that `target` names, by default the builder. Raises ImportError or AttributeError if
        the object does not exist; `Plugin.load_builder` makes them a PluginError.
        """
        return import_object(target or self.build)


@dataclass(frozen=True, kw_only=True)
class ModelRecord(Record):
    """Describes a model for `[model]`. `build(config, data: DataInfo)` returns the layers of the model, a list of modules or of
    (name, module) pairs on the meta device.

    hugging_face: `"module:attribute"` of `hugging_face(plan, source) -> api.files.HuggingFaceModel`, which describes the
        transformers model that has the weights in `source` (an `api.files.TensorReader`), for `train-cli export`, `sample` and
        `chat`; None if transformers has no such model.
    compare: `"module:attribute"` of `compare(config) -> str`, which compares the layers with another implementation of the
        model, for `train-cli check --model`. It returns a note for the user, or raises PlanError if they differ. None if there
        is no such check.
    uses_layer_names: whether every weight is named after its layer, so that an export does not need to build the model.
    """

    hugging_face: str | None = None
    compare: str | None = None
    uses_layer_names: bool = False


@dataclass(frozen=True, kw_only=True)
class AdaptersRecord(Record):
    """Describes adapters for `[adapters]`. `build(config, layer_names)` returns a function `(module, name) -> None`, which adds
    adapters to a layer's module in place.

    The function is called with the module and the name of each layer, on meta and when the layer has its base values, and with
    generators that are seeded for this layer. All parameters are frozen before the call. The run trains the parameters that
    the function adds or unfreezes.

    merge: `"module:attribute"` of `merge(plan, source) -> api.files.TensorReader`, which returns the weights in `source` with
        the adapters merged in, under the names of the model without adapters; None if the adapters cannot be merged.
    export: `"module:attribute"` of `export(plan, source, names, base, out)`, which writes the adapters in `source` into the new
        folder `out`, in peft's format; None if peft has no such adapters. names: transformers' name of each weight, by its name
        in the model without adapters. base: the folder of the model from which the run started, or None if there is none.
    """

    merge: str | None = None
    export: str | None = None


@dataclass(frozen=True, kw_only=True)
class DatasetRecord(Record):
    """Describes data for `[data]`. `build(config, context: DataContext)` returns an `api.data.Dataset` or `api.data.Stream`.

    Each other field is `"module:attribute"` of a function, or None:

    check: `check(config, *, evaluates, vocab_size) -> Iterable[Problem]` reports errors in the table and its files before any
        process starts, without torch. evaluates: whether the plan needs held-out data. vocab_size: the vocabulary size of the
        model, or None if it is unknown.
    text_ids: `text_ids(config, tokenizer: Path | None) -> api.data.TextIds` converts text to token ids and back, for
        `train-cli sample`. tokenizer: the path of a tokenizer that replaces the table's.
    describe_overlap: `describe_overlap(training, evaluated) -> str` describes the part of the held-out data of the table
        `evaluated` on which a run with the table `training` is trained; "" if there is no overlap.
    """

    check: str | None = None
    text_ids: str | None = None
    describe_overlap: str | None = None


@dataclass(frozen=True, kw_only=True)
class LossRecord(Record):
    """Describes a loss for `[loss]`. `build(config)` returns a `protocols.Loss`.

    split_logits: whether the loss also accepts `protocols.SplitLogits` in place of a logits tensor.
    sequence: "whole" for a loss that needs whole sequences. If ranks hold slices, the run gathers them for the loss.
    """

    split_logits: bool = False
    sequence: Literal["slices", "whole"] = "slices"


class ParameterRole(NamedTuple):
    """Describes how an optimizer updates one parameter. name: the value of the `role` option in the parameter's group. lr,
    weight_decay: the defaults for the parameter; a group of the plan may replace them. scope: the scope of the update (see
    `OptimizerRecord`); an elementwise update works on any part of the parameter.
    """

    name: str
    lr: float
    weight_decay: float
    scope: Scope


@dataclass(frozen=True, kw_only=True)
class OptimizerRecord(Record):
    """Describes an optimizer for `[optimizer]`. `build(config, groups, device)` returns a `torch.optim.Optimizer`.

    scope: the gradients on which the update of one element depends: the gradient of this element ("elementwise"), of the whole
        parameter ("per_matrix"), or of the whole model ("global"). With "per_matrix", one rank gets each matrix whole, in every
        layout. The plan check rejects a layout that the scope does not allow.
    roles: `"module:attribute"` of `roles(config, params: Sequence[api.parts.Param]) -> Mapping[str, ParameterRole]`, which
        returns the role of each parameter of the whole model, by name; None if all parameters have the same role. In the
        `holders` of these parameters, `chunk` is the number of the layer in the model.
    """

    scope: Scope = "elementwise"
    roles: str | None = None


class LRScheduleRecord(Record):
    """Describes a learning-rate schedule. `build(config, num_steps)` returns a function that takes the number of a step, from
    0, and returns the factor by which `lr` is multiplied in this step. num_steps: the number of steps of the run.
    """


class AveragingRecord(Record):
    """Describes how `[averaging]` averages weights over steps. `build(config, num_steps)` returns `rule(step, age) -> float`.

    After each update, core sets every average to `average + weight * (value - average)` with `weight = rule(step, age)`, a
    number from 0 to 1 that is the same on all ranks. step: the number of the step, from 0. age: the number of updates since the
    average last equalled the weights, at least 1. The first update sets the averages to the weights. num_steps: the number of
    steps of the run.
    """


@dataclass(frozen=True, kw_only=True)
class PartitionerRecord(Record):
    """Describes how `[partition]` cuts the model. `build(config)` returns a function `(costs, num_chunks) -> boundaries`.

    costs: the cost of each layer: its number of parameters, or its time in seconds if the partitioner has a timer. boundaries:
    the index of the first layer of each chunk, and the number of layers at the end.

    timer: `"module:attribute"` of `timer(plan, world, draft, dtype) -> list[float]`. The timer measures the time in seconds of
        a forward and backward of each layer and returns equal results on all ranks of `world`. `draft(info) -> Model` builds
        the model on meta; `dtype` is the dtype of the working weights. The config must have a `layer_costs` key, by default
        None. The run calls the timer only if `layer_costs` is None, and writes the times into the plan in its folder.
    """

    timer: str | None = None


@dataclass(frozen=True, kw_only=True)
class ScheduleRecord(Record):
    """Describes a schedule for `[pipeline]`. `build(config)` returns a `sley_core.actions.action.Schedule`.

    The fields name the default parts of a plan that uses this schedule. Each field is the full name of a record, such as
    `"pp.link"`, of any plugin:

    link: the stage link.
    partition: the partitioner.
    ties: the gradient handler that sums the gradients of parameters shared by several stages. None selects none.
    """

    link: str = "pp.link"
    partition: str = "pp.balanced"
    ties: str | None = None


class StageLinkRecord(Record):
    """Describes a link between pipeline stages. `build(config)` returns a `StageLink`."""


@dataclass(frozen=True, kw_only=True)
class RoundingRecord(Record):
    """The base class of the records of parts whose results may be rounded.

    tolerance: the relative error that the contract test allows, or a function that returns it for the table; 0.0 for exact
        results.
    """

    tolerance: float | Callable[[Any], float] = 0.0

    def tolerance_for(self, config: Table) -> float:
        """Returns the relative error that the table `config` allows; 0.0 for exact results."""
        return self.tolerance(config) if callable(self.tolerance) else self.tolerance


@dataclass(frozen=True, kw_only=True)
class GradientHandlerRecord(RoundingRecord):
    """Describes a handler for `[[gradient_handlers]]`. `build(config)` returns a `GradientHandler`.

    role: "reducer" sums gradients over the reduce group; "tie" sums them over the pipeline stages that share a parameter;
        "transform" changes gradients; "observer" only reads them.
    result: for a reducer, whether each rank receives the full sum or a shard of it.
    accepts_shards: whether the handler also works after a reducer whose result is a shard. Such a handler reads `store.part`
        instead of `store.gradient`, and calls `parts.weights.settle` before it reads a weight, because a gather of the weight
        may still be in progress.
    tolerance: the relative error of the sum.
    fixed_order: whether the handler supports plans that require a fixed order of summation. A reducer then uses
        `parts.store.reduction.sums`; other handlers need no special order.
    before, after: the roles that this handler must precede or follow in the plan's list.
    """

    role: Role
    result: Literal["full", "shard"] = "full"
    accepts_shards: bool = False
    fixed_order: bool = False
    before: tuple[Role, ...] = ()
    after: tuple[Role, ...] = ()


class SchedulerHookRecord(Record):
    """Describes a hook for `[[scheduler_hooks]]`. `build(config, parts: Parts)` returns a `SchedulerHook`."""


@dataclass(frozen=True, kw_only=True)
class WeightCommunicatorRecord(RoundingRecord):
    """Describes how `[weights]` gathers weights. `build(config)` returns a `WeightCommunicator`.

    fixed_order: whether the communicator supports plans that require a fixed order of summation. It then passes the gradients
        of the microbatches in `parts.store.reduction.concurrent_microbatches(group)` to `store.add_microbatches`, one for each
        microbatch.
    tolerance: the relative error of each gathered weight.
    gather_bytes: a function `(config, itemsize)` that returns the number of bytes per gathered element; None for `itemsize`.
    """

    fixed_order: bool = False
    gather_bytes: Callable[[Any, int], float] | None = None

    def gather_bytes_per_element(self, config: Table, itemsize: int) -> float:
        """Returns the number of bytes that a gather sends for each element of a weight. config: the table of the communicator.
        itemsize: the size of an element in memory, in bytes.
        """
        return itemsize if self.gather_bytes is None else self.gather_bytes(config, itemsize)


class SequenceAttentionRecord(Record):
    """Describes attention on slices. `build(config, group)` returns a `SequenceCommunicator` for ranks that share samples."""


@dataclass(frozen=True, kw_only=True)
class OffloadManagerRecord(Record):
    """Describes a manager for `[[offload]]`. `build(config)` returns an `OffloadManager`.

    parts: a function that takes the manager's config and returns the parts of the run's memory (`memory.Part`) that the manager
        offloads. Two managers of a plan must not share a part.
    scope: a function that takes the config and returns the widest optimizer scope (`OptimizerRecord.scope`) that the manager
        supports.
    steps_on_host: whether the manager keeps full-precision weights and optimizer states on the host and updates them there,
        through `parts.events.step_in_buckets`.
    """

    steps_on_host: bool = False
    parts: Callable[[Any], Sequence[str]]
    scope: Callable[[Any], Scope] = lambda config: "global"


class ActivationPolicyRecord(Record):
    """Describes which activations layers save. `build(config, layer_names)` returns an `ActivationPolicy`."""


def steps_on_host(record: Record | None) -> bool:
    """Returns whether `record` describes an offload manager that steps the optimizer on the host."""
    return isinstance(record, OffloadManagerRecord) and record.steps_on_host


class MetricsWriterRecord(Record):
    """Describes a writer of metrics. `build(config, folder: Path)` returns a `MetricsWriter`; only rank 0 calls it."""


@dataclass(frozen=True, kw_only=True)
class CheckpointerRecord(Record):
    """Describes a checkpointer. `build(config, state: TrainingState)` returns a `Checkpointer` (see `api.state`). `config` is
    None if the plan has no `[checkpoint]` table; such a run saves and loads only when a program asks for it.

    files: `"module:attribute"` of a class that implements `protocols.CheckpointFiles`. The command line uses it to resume,
        export and sample. If it is None, only runs can read the checkpoints.
    keeps_best: whether the checkpointer also keeps the newest checkpoint with `SavedRun.is_best`, as `[evaluation] keep_best`
        requires.
    """

    files: str | None = None
    keeps_best: bool = False


@dataclass(frozen=True)
class ProcessGroupRecord:
    """An extra axis of process groups. Core creates the groups on all ranks, in the plan's order of plugins; `run.groups[axis]`
    is this rank's group.

    axis: the name of the axis.
    ranks: the global ranks of each group, ascending.
    channels: the names of each group's communicators. Exchanges on one channel do not wait for exchanges on another.
    cross_memory: whether ranks on one host may read each other's memory (see `[parallel] cross_memory_attach`).
    """

    axis: str
    ranks: tuple[tuple[int, ...], ...]
    channels: tuple[str, ...] = ("main",)
    cross_memory: bool = False


@dataclass(frozen=True, kw_only=True)
class TransportRecord:
    """Describes a transport, which exchanges tensors between CPU ranks in place of gloo. An entry point of the
    `sley.transports` group names the record. Runs use every installed transport, unless the plan turns `[parallel]
    cross_memory_attach` off.

    connect: `"module:attribute"` of `connect(members, channels, timeout_s) -> dict[str, Transport]`, a collective of the group
        `members`. channels: torch process groups by name. The result has a transport for each channel, or is {} on all ranks if
        the ranks cannot connect. timeout_s: the time limit of each wait.
    scratch: `"module:attribute"` of `scratch(own) -> object`, which allocates the scratch memory that is needed to sum the
        peers' parts of the tensor `own`; memory estimates call it. None if no scratch memory is needed.
    """

    name: str
    connect: str
    scratch: str | None = None


@dataclass(frozen=True)
class Problem:
    """A problem of a plan, which `sley_check_plan` returns. Core adds the file, line and column. path: the path of the key with
    the problem. message: a sentence without a period. hint: what the user can do. code: the error code.
    """

    path: tuple[str | int, ...]
    message: str
    hint: str | None = None
    code: str = "plan-invalid"


def call_factory(
    name: str, path: KeyPath, folder: Path | None, options: Mapping[str, Any], run_arguments: Mapping[str, Any]
) -> Any:
    """Calls the function `name` (see `import_factory`) with the keyword arguments `options`, and with each of `run_arguments`
    that is in the function's signature, and returns the result. `options` take precedence. Raises PlanError "factory-import" if
    the import fails, and "factory-failed" if the call raises anything except a SleyError.
    """
    function = import_factory(name, path, folder)
    try:
        parameters = set(inspect.signature(function).parameters)
    except ValueError:
        parameters = set()  # some C callables have no readable signature
    arguments = {key: run_arguments[key] for key in run_arguments.keys() & parameters}
    try:
        return function(**arguments | deepcopy(dict(options)))  # a factory may run again, and may change a list in its options
    except SleyError:
        raise
    except (Exception, SystemExit) as error:
        package = error.name if isinstance(error, ModuleNotFoundError) else None
        hint = f"install the package that provides `{package}`" if package else None
        message = f"`{name}` failed: {format_cause(error)}"
        raise PlanError("factory-failed", message, path=(*path, "factory"), hint=hint) from error


def import_factory(name: str, path: KeyPath, folder: Path | None) -> Callable[..., Any]:
    """Imports and returns the callable `name`, which is `"package.module:attribute"`. Adds `folder` to `sys.path` first. Raises
    PlanError "factory-import" if there is no such callable. path: the path of the table that names it, for the error.
    """
    if folder and str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    module_name, _, attribute = name.partition(":")
    key = (*path, "factory")
    try:
        target: Any = import_module(module_name)
    except (Exception, SystemExit) as error:
        searched = f" or put the module into `{folder}`" if folder else ""
        hint = f"install the package{searched}" if isinstance(error, ModuleNotFoundError) else None
        raise PlanError("factory-import", f"cannot import `{name}`: {format_cause(error)}", path=key, hint=hint) from error
    for part in attribute.split("."):
        if not hasattr(target, part):
            source = getattr(target, "__file__", None) or f"`{module_name}`"
            hint = suggestion(part, (name for name in vars(target) if not name.startswith("_")))
            raise PlanError("factory-import", f"cannot import `{name}`: {source} has no `{part}`", path=key, hint=hint)
        target = getattr(target, part)
    if not callable(target):
        raise PlanError("factory-import", f"`{name}` is a {type(target).__name__}, which cannot be called", path=key)
    function: Callable[..., Any] = target
    return function

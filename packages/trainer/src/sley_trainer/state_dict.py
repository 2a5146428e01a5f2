"""Saves and loads a run's weights under names that are the same in every layout.

Weights are saved as safetensors files; each stage writes its own:

    every rank of a stage    a part of a master  ──> sum over the ranks that share it          (`precision = "full"`)
    its first replica        shards of one weight ──> gather over `wp` ──> the first rank's file
    rank 0                   all files are there ──> index ──> the folder gets its name

Only one weight is gathered at a time, and no rank holds a file in memory.

Full tensors are loaded on every rank, which copies its own part. Every rank knows the names of the full model, so it can
distinguish a misspelt name from a name of another stage. Ranks exchange their faults and a checksum of each value, since
replicas that load different values would stay different.

Files hold only tensors, so the extra state of a module (`get_extra_state`) is written as text (uint8 [bytes]), under torch's
name for it. It must be plain data: None, numbers, strings, bytes, tensors, and lists, tuples and dicts of them.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from sley_core.engine.agreement import RankAgreement
from sley_core.engine.parts import Parts
from sley_core.engine.registry import Param, ParameterRegistry
from sley_core.engine.shards import REDUCE_GROUP, SHARD_AXIS, gather_full_tensors
from sley_core.engine.weights import MasterWeights
from sley_core.errors import RunError, SleyError, format_cause, shorten_names
from sley_core.json_text import decode_value, encode_value
from sley_core.model.layers import Layer
from sley_core.model.tensors import checksum
from sley_core.weight_files import write

EXTRA_STATE_KEY = "_extra_state"
"""The last part of the name of a module's extra state, as in torch's state dict."""


def modules_with_extra_state(layers: Iterable[Layer]) -> Iterator[tuple[str, nn.Module]]:
    """Yields the name of the extra state (`<module>._extra_state`) and the module for each module with `get_extra_state`."""
    for layer in layers:
        for name, module in layer.module.named_modules(prefix=layer.name):
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield f"{name}.{EXTRA_STATE_KEY}", module


def encode_extra_state(name: str, module: nn.Module) -> Tensor:
    """Returns the extra state of `module` as text, uint8 [bytes] on the host. Raises RunError "extra-state" if this fails."""
    try:
        text = json.dumps(encode_value(module.get_extra_state()))
    except TypeError as error:
        message = f"the result of {type(module).__name__}.get_extra_state() cannot be saved as {name!r}: {error}"
        hint = "return numbers, strings, bytes, tensors, and lists, tuples and dicts of them"
        raise RunError("extra-state", message, hint=hint) from error
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def check_extra_states(layers: Iterable[Layer]) -> None:
    """Raises RunError "extra-state" if a module's extra state cannot be saved. Skips modules that have not created it yet."""
    for name, module in modules_with_extra_state(layers):
        with suppress(AttributeError):
            encode_extra_state(name, module)


def set_extra_state(module: nn.Module, value: Tensor) -> None:
    """Sets the extra state of `module` to `value`, a result of `encode_extra_state` on any device."""
    module.set_extra_state(decode_value(json.loads(value.cpu().numpy().tobytes())))


Precision = Literal["working", "full"]
"""working: the weights in the dtype of the forward. full: the weights that the optimizer updates, in fp32 or wider."""

_INTEGER_DTYPES = {4: torch.int32, 8: torch.int64}
"""Integer dtypes by bytes per element. Parts of weights are summed as integers, because adding 0 then keeps every bit."""


class _SavedTensor(NamedTuple):
    """A tensor that this rank's stage saves: a parameter, a buffer or an extra state. Either `param` or `buffer` is None."""

    spec: write.Spec
    param: Param | None
    buffer: Tensor | None


class WeightSaver:
    """Saves this rank's `parts` of a model and their `masters`, for `Run.save_weights`."""

    def __init__(self, parts: Parts, masters: MasterWeights) -> None:
        self._parts = parts
        self._masters = masters
        self._control = parts.groups["control"]
        self._is_first_copy = parts.groups[REDUCE_GROUP].coord == 0
        self._writes = self._is_first_copy and parts.groups[SHARD_AXIS].coord == 0
        self._optimizer_params = {entry.param: entry for entry in masters.local_params}
        # All ranks must take the same branch, so it depends on sharded buffers, not on the part that this rank updates.
        self._shards = {param: buffer.shard for buffer in parts.store.buffers if buffer.shard for param in buffer.params}

    def check(self, folder: Path) -> None:
        """Raises the same RunError on all ranks: "weights-unsaved" if `folder` has files other than weights,
        "checkpoint-folder" if one of several writing ranks cannot see the parent of `folder`. Every rank must call it.
        """
        failure = _describe_failure(partial(write.check_replaceable, folder), folder) if self._parts.world.rank == 0 else ""
        self._exchange_files([], failure, folder, {})
        if self._parts.topology.pp > 1:
            open_folder, timeout_s = partial(write.LocalProbeFolder, folder.parent), self._parts.limits.collective_timeout_s
            write.probe(str(folder.parent), open_folder, self._control, timeout_s, writes=self._writes)

    def __call__(
        self, folder: Path, precision: Precision, max_file_bytes: int, require: Callable[[], None], metadata: Mapping[str, str]
    ) -> None:
        """Saves the weights as `Run.save_weights` describes. Every rank must call it. Ranks exchange their failures after each
        part, so that all raise RunError "weights-unsaved" and none hangs. require: a function that raises an error if the
        memory to read is offloaded. metadata: the metadata of each file; the metadata of rank 0 is used.
        """
        RankAgreement(self._parts.groups).begin(f"saving weights ({precision}) in {folder}").check()
        is_first, sources = self._parts.world.rank == 0, list[_SavedTensor]()

        def prepare() -> None:
            require()
            sources.extend(self._list_sources(precision))
            if is_first:
                write.begin_folder(folder)

        failure = _describe_failure(prepare, folder)
        specs_of_rank = [source.spec for source in sources] if self._writes else []
        files, metadata = self._exchange_files(
            write.split_by_size(specs_of_rank, lambda spec: spec.num_bytes, max_file_bytes), failure, folder, metadata
        )
        local_names = {spec.name: name for name, rank, specs in files for spec in specs if rank == self._parts.world.rank}
        self._exchange_files([], self._write(sources, local_names, precision, folder, metadata), folder, {})
        failure = ""
        if is_first:
            specs_by_file = {name: specs for name, _, specs in files}
            missing = [name for name in specs_by_file if not (write.scratch_folder(folder) / name).is_file()]
            failure = f"`{missing[0]}` was written to a folder that rank 0 does not see" if missing else ""
            failure = failure or _describe_failure(partial(write.complete_folder, folder, specs_by_file), folder)
        self._exchange_files([], failure, folder, {})

    def _exchange_files(
        self, files: list[list[write.Spec]], failure: str, folder: Path, metadata: Mapping[str, str]
    ) -> tuple[list[tuple[str, int, list[write.Spec]]], Mapping[str, str]]:
        """Exchanges this rank's files and failure; returns the name, the writing rank and the tensors of each file of any rank,
        and the metadata of rank 0. If a rank failed, discards the unfinished folder and raises RunError "weights-unsaved".
        """
        # All ranks join this exchange in the `control` group the same number of times, even after a failure.
        messages = self._control.gather_objects([failure, files, dict(metadata)], label="the files to save")
        reasons = zip(self._control.ranks, (reason for reason, _, _ in messages), strict=True)
        if failures := [f"rank {rank}: {reason}" for rank, reason in reasons if reason]:
            if self._parts.world.rank == 0:
                write.discard_scratch_folder(folder)
            hint = "use a folder that every rank can write to"
            raise RunError("weights-unsaved", f"the weights are not saved in `{folder}`: {failures[0]}", hint=hint)
        files_of_ranks = [
            (rank, [write.Spec(name, dtype, tuple(shape)) for name, dtype, shape in specs])
            for rank, (_, lists, _) in zip(self._control.ranks, messages, strict=True)
            for specs in lists
        ]
        names = write.weight_file_names(len(files_of_ranks))
        return [(name, *file) for name, file in zip(names, files_of_ranks, strict=False)], messages[0][2]

    def _list_sources(self, precision: Precision) -> Iterator[_SavedTensor]:
        """Yields the tensors that this rank's stage saves, in the same order on all ranks of the stage."""
        stage = self._parts.groups["pp"].coord
        master_dtype = self._masters.dtype if precision == "full" else None
        for param in self._parts.registry:
            if param.stages[0] == stage:  # the first of its stages writes a tied weight
                yield _SavedTensor(
                    write.Spec.from_dtype(param.name, master_dtype or param.parameter.dtype, param.shape), param, None
                )
        for layer in self._parts.layers:
            buffers = [
                (f"{prefix}.{name}", buffer)
                for prefix, module in layer.module.named_modules(prefix=layer.name)
                for name, buffer in module._buffers.items()
                if buffer is not None and name not in module._non_persistent_buffers_set
            ]
            buffers += [(name, encode_extra_state(name, module)) for name, module in modules_with_extra_state([layer])]
            for name, buffer in buffers:
                yield _SavedTensor(write.Spec.from_dtype(name, buffer.dtype, buffer.shape), None, buffer)

    @torch.no_grad()
    def _write(
        self,
        sources: list[_SavedTensor],
        file_of_tensor: dict[str, str],
        precision: Precision,
        folder: Path,
        metadata: Mapping[str, str],
    ) -> str:
        """Writes this rank's files; returns the reason for a failure, or "". A failed rank still joins every collective."""
        files: dict[str, list[write.Spec]] = {}
        for source in sources if self._writes else ():
            files.setdefault(file_of_tensor[source.spec.name], []).append(source.spec)
        failure = ""
        with write.TensorFilesWriter(write.scratch_folder(folder), files, metadata) as tensor_files:
            for source in sources:
                value = self._gather_full_tensor(source, precision)
                if value is not None and not failure:
                    failure = _describe_failure(partial(tensor_files.add, source.spec.name, value), folder)
            return failure or _describe_failure(tensor_files.close, folder)

    def _gather_full_tensor(self, source: _SavedTensor, precision: Precision) -> Tensor | None:
        """Returns the full tensor on the rank that writes it, and None on other ranks. All ranks of the stage must call it."""
        if source.param is None:
            return source.buffer if self._writes else None
        value = self._master_shard(source.param) if precision == "full" else source.param.parameter.detach()
        if not self._is_first_copy:
            return None
        # All ranks of `wp` in the first replica join this collective.
        if source.param.shard is not None:
            value = gather_full_tensors({source.param: value}, self._parts.groups)[source.param]
        return value if self._writes else None

    def _master_shard(self, param: Param) -> Tensor:
        """Returns the master weight of this rank's shard of `param`. All ranks of the parameter's reduce group must call this
        method, since each of them may update a part.
        """
        parameter, master_dtype = param.parameter, self._masters.dtype
        entry, shard = self._optimizer_params.get(param), self._shards.get(param)
        if shard is None:
            value = parameter.detach() if entry is None else entry.parameter.detach()
            return value.to(device=parameter.device, dtype=master_dtype)
        flat = torch.zeros(parameter.numel(), dtype=master_dtype, device=parameter.device)
        group = self._parts.groups[param.reduce_group]
        # Other ranks of the reduce group may have copies of the same parts, so only the first copy is added.
        if entry is not None and entry.elements is not None and group.ranks[0] in self._parts.groups[shard.axis].ranks:
            flat[entry.elements.first : entry.elements.last] = entry.parameter.detach().reshape(-1)
        # All ranks of the reduce group join: they save the same parameters in the order of the registry.
        bits = flat.view(_INTEGER_DTYPES[flat.element_size()])
        group.all_reduce(bits, label=f"the master of {param.name}").wait()
        return flat.reshape(parameter.shape)


def _describe_failure(change: Callable[[], object], folder: Path) -> str:
    """Calls `change`, which changes `folder`, and returns a description of its failure, or "" on success."""
    try:
        change()
    except SleyError as error:
        return error.diagnostics[0].message
    except OSError as error:
        return write.describe_write_error(error, folder)
    return ""


Pairs = Iterable[tuple[str, Tensor]]  # names with full tensors


class LoadedWeights(NamedTuple):
    """The result of `load_weights`. missing: parameters that only the model has. unknown: names that only the state has."""

    missing: list[str]
    unknown: list[str]


class ModelNames(NamedTuple):
    """The names of all tensors of a model. parameters: the parameter's name in the registry, keyed by each of its names (a tied
    parameter has several). buffers: the names of buffers and extra states.
    """

    parameters: Mapping[str, str]
    buffers: set[str]


def collect_names(layers: Sequence[Layer]) -> ModelNames:
    """Returns the names of the parameters, buffers and extra states of a model with these `layers`."""
    parameters = {name: param.name for param in ParameterRegistry([layers]) for name in (param.name, *param.aliases)}
    buffers = {name for layer in layers for name, _ in layer.module.named_buffers(layer.name, True, False)}
    return ModelNames(parameters, buffers | {name for name, _ in modules_with_extra_state(layers)})


def load_weights(
    names: ModelNames, parts: Parts, masters: MasterWeights, state: Mapping[str, Tensor] | Pairs, *, strict: bool
) -> LoadedWeights:
    """Loads `state` into this rank's `parts` of a model with these `names`, and into `masters`, as `Run.load_weights`
    describes. Every rank must call it, since it runs two blocking collectives over `control`.
    """
    RankAgreement(parts.groups).begin("loading weights").check()
    loading = _WeightLoader(names, parts, masters)
    if not isinstance(state, Mapping):
        loading.check_pairs(state, writes=True)
        return loading.exchange_reports(strict)
    loading.check_pairs(state.items())
    loaded = loading.exchange_reports(strict)
    for name, value in state.items():
        loading.write(name, value)
    return loaded


class _WeightLoader:
    """Runs one call of `load_weights` on this rank. checksums: the checksums of the loaded parameters and buffers, by name."""

    def __init__(self, names: ModelNames, parts: Parts, masters: MasterWeights) -> None:
        self.names = names
        self.masters = masters
        self.control = parts.groups["control"]
        self.params = {param.name: param for param in parts.registry}
        self.base_checksums = parts.registry.base_checksums
        self.buffers = {
            name: buffer for layer in parts.layers for name, buffer in layer.module.named_buffers(layer.name, True, False)
        }
        self.extra_state_modules = dict(modules_with_extra_state(parts.layers))
        self.faults: list[str] = []
        self.unknown_names: list[str] = []
        self.checksums: dict[str, int] = {}
        self.received_names: set[str] = set()

    def check_pairs(self, pairs: Pairs, *, writes: bool = False) -> None:
        """Checks every pair, and appends faults to `self.faults`. If `writes`, also writes the pairs before the first fault."""
        try:
            for name, value in pairs:
                self._check_value(name, value)
                if writes and not self.faults:
                    self.write(name, value)
        except Exception as error:
            self.faults.append(f"the weights could not be read: {format_cause(error)}")

    @torch.no_grad()
    def write(self, name: str, value: Tensor) -> None:
        """Copies `value` into this rank's weight, shard, buffer or extra state `name`. Does nothing if the rank has none."""
        param, buffer = self.params.get(self.names.parameters.get(name, name)), self.buffers.get(name)
        if param is not None:
            if param.name in self.base_checksums:
                self.base_checksums[param.name] = self.checksums[param.name]
            local_value = value.detach() if param.shard is None else param.shard.cut(value.detach())
            self.masters.set(param, local_value)
        elif buffer is not None:
            buffer.copy_(value)
        elif name in self.extra_state_modules:
            set_extra_state(self.extra_state_modules[name], value)

    def exchange_reports(self, strict: bool) -> LoadedWeights:
        """Exchanges faults, names and checksums, and returns all ranks' missing and unknown names. All ranks must call it. All
        raise RunError "weights-mismatch" after a fault, or "weights-differ" if ranks received different values. strict: whether
        missing and unknown names are faults.
        """
        control = self.control
        missing = [name for name in self.params if name not in self.received_names]
        if strict:
            self.faults += [f"{name!r} is missing" for name in missing] + [
                f"{name!r} is unknown" for name in self.unknown_names
            ]
        # all ranks join this exchange in the `control` group, even after a fault
        report = [self.faults, missing, self.unknown_names, self.checksums]
        *lists, sums_of_ranks = zip(*control.gather_objects(report, label="the reports on loaded weights"), strict=True)
        faults, missing, unknown = (list(dict.fromkeys(chain.from_iterable(lists_of_ranks))) for lists_of_ranks in lists)
        if faults:
            message = f"these are not the weights of this model: {shorten_names(faults)}"
            raise RunError("weights-mismatch", message, hint="use the names of `run.registry`, or strict=False")
        sums: dict[str, tuple[int, int]] = {}
        for rank, sums_of_rank in zip(control.ranks, sums_of_ranks, strict=True):
            for name, value in sums_of_rank.items():
                known_checksum, first_rank = sums.setdefault(name, (value, rank))
                if known_checksum != value:
                    message = f"ranks {first_rank} and {rank} received different values of {name!r}"
                    raise RunError("weights-differ", message, hint="pass the same state on all ranks")
        return LoadedWeights(missing, unknown)

    def _check_value(self, name: str, value: Tensor) -> None:
        """Checks the name, shape and dtype of `value`. Records a fault, or the checksum that `exchange_reports` compares."""
        registry_name = self.names.parameters.get(name, name)
        self.received_names.add(registry_name)
        if name not in self.names.parameters and name not in self.names.buffers:
            self.unknown_names.append(name)
        param, buffer = self.params.get(registry_name), self.buffers.get(name)
        if param is not None:
            shape = param.shape
        elif buffer is not None:
            shape = tuple(buffer.shape)
        else:
            return  # another stage holds this tensor
        fault = ""
        if not isinstance(value, Tensor):
            fault = f"must be a tensor, but is a {type(value).__name__}"
        elif tuple(value.shape) != shape:
            fault = f"must have the shape {list(shape)}, but has {list(value.shape)}"
        elif param is not None and not value.is_floating_point():
            fault = f"must be floating-point, but is {value.dtype}"
        elif value.is_meta:
            fault = "is on meta and has no values"
        else:
            digest = checksum(value)
            if self.checksums.setdefault(registry_name, digest) != digest:
                fault = "differs from the parameter to which it is tied"
        if fault:
            self.faults.append(f"{name!r} {fault}")

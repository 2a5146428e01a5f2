"""Saves a run's weights as safetensors files, by names that no layout changes. Each stage writes its own files.

    every rank of a stage    a part of a master  ──> sum over the ranks that share it          (`precision = "full"`)
    its first replica        shards of one weight ──> gather over `wp` ──> the first rank's file
    rank 0                   all files are there ──> index ──> the folder gets its name

Only one weight is gathered at a time, and no rank holds a file in memory.

The extra state of modules (`get_extra_state`) has torch's name in files of weights and in checkpoints. torch's state dict holds
any object there; files hold tensors. So it is written as text, uint8 [bytes], and must be plain data: None, numbers, strings,
bytes, tensors, and lists, tuples and dicts of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor, nn

from sley_core.engine.agreement import Agreement
from sley_core.engine.shards import AXIS, REDUCE_GROUP, gather_full_tensors
from sley_core.errors import RunError, SleyError
from sley_core.json_text import decode_value, encode_value
from sley_core.sizes import split_by_size
from sley_core.weight_files.write import (
    LocalProbeFolder,
    Spec,
    TensorFiles,
    begin_folder,
    check_replaceable,
    complete_folder,
    describe_write_error,
    discard_folder,
    file_names,
    probe,
    scratch_folder,
)

if TYPE_CHECKING:
    from sley_core.engine.parts import Parts
    from sley_core.engine.registry import Param
    from sley_core.engine.weights import Masters
    from sley_core.model.layers import Layer

KEY = "_extra_state"
"""The suffix of an extra state's name, as in torch's state dict."""


def modules_with_extra_state(layers: Iterable[Layer]) -> Iterator[tuple[str, nn.Module]]:
    """Yields the name of the extra state, and the module, of each module that has one."""
    for layer in layers:
        for name, module in layer.module.named_modules(prefix=layer.name):
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield f"{name}.{KEY}", module


def extra_state(name: str, module: nn.Module) -> Tensor:
    """Returns the extra state of `module`, uint8 [bytes] on the host. Raises RunError `extra-state` unless it is plain data."""
    try:
        text = json.dumps(encode_value(module.get_extra_state()))
    except TypeError as error:
        message = f"the result of {type(module).__name__}.get_extra_state() cannot be saved as {name!r}: {error}"
        hint = "return numbers, strings, bytes, tensors, and lists, tuples and dicts of them"
        raise RunError("extra-state", message, hint=hint) from error
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def check_extra_states(layers: Iterable[Layer]) -> None:
    """Raises RunError `extra-state` for modules whose extra state cannot be saved; skips states made in the first use."""
    for name, module in modules_with_extra_state(layers):
        with suppress(AttributeError):
            extra_state(name, module)


def set_extra_state(module: nn.Module, value: Tensor) -> None:
    module.set_extra_state(decode_value(json.loads(value.cpu().numpy().tobytes())))


Precision = Literal["working", "full"]
"""working: the weights in the dtype of the forward. full: the weights that the optimizer updates, in fp32 or wider."""

_BITS = {4: torch.int32, 8: torch.int64}
"""The integer dtype by bytes per element: adding zeros to its values keeps every bit."""


class _Source(NamedTuple):
    """Names a tensor that this rank's stage writes: a parameter or a buffer."""

    spec: Spec
    param: Param | None
    buffer: Tensor | None


class WeightSaver:
    """Saves this rank's `parts` of a model and their `masters`, for `Run.save_weights`."""

    def __init__(self, parts: Parts, masters: Masters) -> None:
        self._parts = parts
        self._masters = masters
        self._control = parts.groups["control"]
        self._is_first_copy = parts.groups[REDUCE_GROUP].coord == 0
        self._writes = self._is_first_copy and parts.groups[AXIS].coord == 0
        self._stepped = {stepped.param: stepped for stepped in masters.stepped}
        # All ranks must take the same branch, so it depends on sharded buffers, not on the part that this rank updates.
        self._shards = {param: buffer.shard for buffer in parts.store.buffers if buffer.shard for param in buffer.params}

    def check(self, folder: Path) -> None:
        """Raises the same RunError on all ranks: "weights-unsaved" if `folder` has other files, "checkpoint-folder" if a
        writing rank cannot see the folder that contains it. Every rank calls it. A single writer is not tested.
        """
        failure = ""
        try:
            check_replaceable(folder)
        except RunError as error:
            failure = error.diagnostics[0].message
        self._exchange_files([], failure if self._parts.world.rank == 0 else "", folder, {})
        if self._parts.topology.pp > 1:
            probe(LocalProbeFolder(folder.parent), self._control, self._parts.limits.collective_timeout_s, writes=self._writes)

    def __call__(
        self, folder: Path, precision: Precision, max_file_bytes: int, require: Callable[[], None], metadata: Mapping[str, str]
    ) -> None:
        """Saves the weights as `Run.save_weights` describes. Every rank calls it. Ranks exchange failures over `control` after
        each part, so that all ranks raise and none waits. require: raises if memory that is read here is offloaded. metadata:
        the files' metadata; only those of rank 0 count.
        """
        Agreement(self._parts.groups).begin(f"saving weights ({precision}) in {folder}").check()
        sources: list[_Source] = []
        failure = ""
        try:
            require()
            sources = list(self._list_sources(precision))
            if self._parts.world.rank == 0:
                begin_folder(folder)
        except SleyError as error:
            failure = error.diagnostics[0].message
        except OSError as error:
            failure = describe_write_error(error, folder)
        specs_of_rank = [source.spec for source in sources] if self._writes else []
        files, metadata = self._exchange_files(
            split_by_size(specs_of_rank, lambda spec: spec.num_bytes, max_file_bytes), failure, folder, metadata
        )
        local_names = {spec.name: name for name, rank, specs in files for spec in specs if rank == self._parts.world.rank}
        failure = self._write(sources, local_names, precision, folder, metadata)
        self._exchange_files([], failure, folder, {})
        if self._parts.world.rank == 0:
            specs_by_file = {name: specs for name, _, specs in files}
            missing = [name for name in specs_by_file if not (scratch_folder(folder) / name).is_file()]
            failure = f"`{missing[0]}` was written to a folder that rank 0 does not see" if missing else ""
            try:
                if not failure:
                    complete_folder(folder, specs_by_file)
            except OSError as error:
                failure = describe_write_error(error, folder)
        self._exchange_files([], failure, folder, {})

    def _exchange_files(
        self, files: list[list[Spec]], failure: str, folder: Path, metadata: Mapping[str, str]
    ) -> tuple[list[tuple[str, int, list[Spec]]], Mapping[str, str]]:
        """Exchanges this rank's files and failure; returns name, rank and tensors of every rank's files, and the metadata of
        rank 0. If any rank failed, discards the unfinished folder and raises RunError "weights-unsaved" on all ranks.
        """
        # Over all ranks: each of them reaches this three times, even after a failure.
        messages = self._control.gather_objects([failure, files, dict(metadata)], label="the files to save")
        failures = [
            f"rank {rank}: {failure_of_rank}"
            for rank, (failure_of_rank, _, _) in zip(self._control.ranks, messages, strict=True)
            if failure_of_rank
        ]
        if failures:
            if self._parts.world.rank == 0:
                discard_folder(folder)
            hint = "use a folder that every rank can write to"
            raise RunError("weights-unsaved", f"the weights are not saved in `{folder}`: {failures[0]}", hint=hint)
        files_of_ranks = [
            (rank, [Spec(name, dtype, tuple(shape)) for name, dtype, shape in specs])
            for rank, (_, lists, _) in zip(self._control.ranks, messages, strict=True)
            for specs in lists
        ]
        named = [
            (name, *rank_and_specs)
            for name, rank_and_specs in zip(file_names(len(files_of_ranks)), files_of_ranks, strict=False)
        ]
        return named, messages[0][2]

    def _list_sources(self, precision: Precision) -> Iterator[_Source]:
        """Yields the tensors that this rank's stage writes, in the order of the registry, equal on all ranks of the stage."""
        stage = self._parts.groups["pp"].coord
        master_dtype = self._masters.dtype if precision == "full" else None
        for param in self._parts.registry:
            if param.stages[0] == stage:  # of a tie, the first stage
                yield _Source(Spec.from_dtype(param.name, master_dtype or param.parameter.dtype, param.shape), param, None)
        for layer in self._parts.layers:
            buffers = [
                (f"{prefix}.{name}", buffer)
                for prefix, module in layer.module.named_modules(prefix=layer.name)
                for name, buffer in module._buffers.items()
                if buffer is not None and name not in module._non_persistent_buffers_set
            ]
            buffers += [(name, extra_state(name, module)) for name, module in modules_with_extra_state([layer])]
            for name, buffer in buffers:
                yield _Source(Spec.from_dtype(name, buffer.dtype, buffer.shape), None, buffer)

    @torch.no_grad()
    def _write(
        self,
        sources: list[_Source],
        file_of_tensor: dict[str, str],
        precision: Precision,
        folder: Path,
        metadata: Mapping[str, str],
    ) -> str:
        """Writes this rank's files, and returns the failure or "". A failed rank still takes part in every exchange."""
        files: dict[str, list[Spec]] = {}
        for source in sources if self._writes else ():
            files.setdefault(file_of_tensor[source.spec.name], []).append(source.spec)
        failure = ""
        with TensorFiles(scratch_folder(folder), files, metadata) as tensor_files:
            for source in sources:
                value = self._gather_full(source, precision)
                if value is None or failure:
                    continue
                try:
                    tensor_files.add(source.spec.name, value)
                except OSError as error:
                    failure = describe_write_error(error, folder)
            try:
                if not failure:
                    tensor_files.close()
            except OSError as error:
                failure = describe_write_error(error, folder)
        return failure

    def _gather_full(self, source: _Source, precision: Precision) -> Tensor | None:
        """Returns the full tensor on the rank that writes it, or None on other ranks. A collective over the stage."""
        if source.param is None:
            return source.buffer if self._writes else None
        value = self._master_shard(source.param) if precision == "full" else source.param.parameter.detach()
        if not self._is_first_copy:
            return None
        # A collective over `wp` of the first replica, all ranks of which reach this line.
        whole = (
            value
            if source.param.shard is None
            else gather_full_tensors({source.param: value}, self._parts.groups)[source.param]
        )
        return whole if self._writes else None

    def _master_shard(self, param: Param) -> Tensor:
        """Returns the master weight of this rank's shard of `param`, gathered from the ranks that update parts of it."""
        parameter, master_dtype = param.parameter, self._masters.dtype
        stepped, shard = self._stepped.get(param), self._shards.get(param)
        if shard is None:
            value = parameter.detach() if stepped is None else stepped.parameter.detach()
            return value.to(device=parameter.device, dtype=master_dtype)
        flat = torch.zeros(parameter.numel(), dtype=master_dtype, device=parameter.device)
        group = self._parts.groups[param.reduce_group]
        # Other ranks of the reduce group may have copies of the parts: only the first copy is added.
        if stepped is not None and stepped.elements is not None and group.ranks[0] in self._parts.groups[shard.axis].ranks:
            flat[stepped.elements.first : stepped.elements.last] = stepped.parameter.detach().reshape(-1)
        # Over the reduce group, all of whose ranks save the same parameters in the order of the registry.
        bits = flat.view(_BITS[flat.element_size()])
        group.all_reduce(bits, label=f"the master of {param.name}").wait()
        return flat.reshape(parameter.shape)

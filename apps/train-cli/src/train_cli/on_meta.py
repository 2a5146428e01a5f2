"""Builds the model and calls its layers on meta, before any process starts: shapes and dtypes, and no values.

A run would find the same mistakes in its first step. Layers that cannot run on meta (a forward that reads values, a kernel of
one device) are reported as not checked, which is no error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sley_core.assemble import DTYPES, assemble, draft_model
from sley_core.comm.world import World
from sley_core.config import CrossEntropyConfig
from sley_core.data.batches import Slices, collate_of
from sley_core.data.dataset import BOUNDARY_FIELDS, is_stream
from sley_core.engine.boundary import flatten, unflatten
from sley_core.engine.stage import by_parameters, stage_of
from sley_core.errors import PlanError, RunError, SleyError
from sley_core.model.buffers import is_per_rank, refuse_written
from sley_core.model.layers import MODEL, Model
from sley_core.model.tensors import buffer_format, formats_hint, parameter_format
from train_cli.progress import MIB, memory, parameters

if TYPE_CHECKING:
    from sley_core.data.dataset import AnyDataset, DataInfo
    from sley_core.model.layers import Layer
    from sley_core.plan.plan import Plan
    from sley_core.topology import Topology


def check_model(plan: Plan, world: int, *, calls_layers: bool = False) -> list[str]:
    """Assembles rank 0 of `world` ranks in a fake world: the same code as in a run, without memory or peers.

    calls_layers: also call all layers and the loss on meta; a run does that itself on its device. Returns notes: the
    number of parameters, the host memory that first values take, and where a run would differ.

    Raises PlanError or PluginError as `assemble` does, the errors of `check_layers`, and RunError "no-device", which otherwise
    only the ranks would find.
    """
    if plan.run.device == "cuda" and not torch.cuda.is_available():
        hint = '`device = "auto"` takes what there is'
        message = "the plan asks for CUDA, but torch finds no CUDA device"
        raise plan.located(RunError("no-device", message, path=("run", "device"), hint=hint))
    with World.fake(0, world) as fake:
        try:
            with assemble(plan, fake) as run:
                notes = [parameters(run.facts.num_parameters, run.facts.num_trained), *run.notes]
                dataset = run.dataset
            model = draft_model(plan, dataset.info)
            on_gpus = plan.run.device != "cpu" and torch.cuda.is_available()
            notes += host_notes(model, min(world, torch.cuda.device_count()) if on_gpus else world)
            dtype, topology = DTYPES[plan.precision.compute], plan.topology(world)
            note = check_layers(plan, topology, model, dataset, dtype, calls_all=calls_layers)
            notes += [note] if note else []
            # Ranks are processes of their own, and open it again: what it holds, such as workers, is not to stay with them.
            if world > 1 and callable(close := getattr(dataset, "close", None)):
                close()
        except SleyError as error:
            raise plan.located(error) from error.__cause__
    return notes


def host_notes(model: Model, on_host: int) -> list[str]:
    """Returns notes on the host memory that the factory of `model`, on meta, takes for first values, of which builders take
    little, and on why it does not run on meta.

    on_host: the number of ranks on a host. A rank of a real run makes all layers without a builder at once.
    """
    tensors = {
        id(tensor): tensor.nbytes
        for layer in model.layers
        if layer.builder is None
        for tensor in (*layer.module.parameters(), *layer.module.buffers())
    }
    notes, each = [], sum(tensors.values())
    if each:
        total, present = each * on_host, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        note = f"each rank makes all first values on its host before it drops those of others: {memory(each / MIB)}"
        note += f", {memory(total / MIB)} for {on_host} ranks on a host" if on_host > 1 else ""
        if total > present:
            note += f"; this one has {memory(present / MIB)}: return builders (docs/save-resume-load.md)"
        notes.append(note)
    if model.recipe is not None and model.recipe.needs_host:
        notes.append(f"the factory does not run without values, and took as much memory here: {model.recipe.needs_host}")
    return notes


def meta_micro_batch(plan: Plan, dataset: AnyDataset) -> dict[str, Tensor]:
    """Returns a micro-batch of the plan's data as the first rank of `sp` gets it, on meta: {field: [micro_size, ...]}.

    A dataset given by `use` whose sequences have one length declares its fields, and is not read: `cu_seqlens` is that of one
    document, and other fields without a sequence dim are left out. Of others the first sample is read. Raises ValueError for a
    stream of the latter kind, and whatever the user's dataset raises.
    """
    whole = micro_batch(plan, dataset)
    declared = {name: field for name, field in dataset.info.fields.items() if name in whole}
    return {name: value.to("meta") for name, value in Slices(declared, plan.parallel.sp, 0)(whole).items()}


def meta_state(layer: Layer, dtype: torch.dtype, keep: Sequence[str] = ()) -> dict[str, Tensor]:
    """Returns parameters and buffers on meta, by name, in a run's formats. dtype: of parameters that `keep` does not name."""
    state = {
        name: torch.empty_like(buffer, device="meta", dtype=buffer_format(buffer, dtype))
        for name, buffer in layer.module.named_buffers()
    }
    return state | {
        name: parameter.to(parameter_format(f"{layer.name}.{name}", dtype, keep))
        for name, parameter in layer.module.named_parameters()
    }


def meta_output(layer: Layer, args: tuple[Any, ...], fields: Mapping[str, Tensor], state: dict[str, Tensor]) -> Any:
    """Returns the output of `layer` on meta, called with `args` and its own `fields` out of these.

    state: of `meta_state`; the forward writes to it. Raises what the layer's forward raises.
    """
    named = {name: fields[name] for name in layer.fields}
    with torch.device("meta"):  # tensors that the forward creates are on meta too
        return torch.func.functional_call(layer.module, state, args, named)


def micro_batch(plan: Plan, dataset: AnyDataset) -> dict[str, Tensor]:
    """Returns a micro-batch of whole sequences on the host, as `meta_micro_batch` describes: tokens of one document, or copies
    of the first sample.
    """
    info, size = dataset.info, plan.batch.micro_size
    if plan.data.record is not None and info.sequence is not None:
        lengths = {name: info.sequence for name, field in info.fields.items() if field.sequence_dim is not None}
        lengths |= {name: 2 for name in BOUNDARY_FIELDS if name in info.fields and name not in lengths}  # its start and end
        fields = {}
        for name, length in lengths.items():
            fields[name] = torch.zeros(size, length, dtype=getattr(torch, info.fields[name].dtype))
            if name in BOUNDARY_FIELDS:  # positions count up; the boundaries of one document are 0 and its length
                fields[name] += torch.arange(length) if length != 2 else torch.tensor([0, info.sequence])
        return fields
    if is_stream(dataset):
        raise ValueError("a stream is not opened for it")
    return collate_of(dataset)([dataset[0]] * size)  # type: ignore[index]  # it is no stream


_OF_A_DEVICE = re.compile(
    r"meta|device|cuda|\bgpu|\bcpu|triton|pointer|storage|numpy|data.dependent|not (been )?implemented"
    r"|mat_a|grouped|stateless api|jit",
    re.IGNORECASE,
)
"""Words of errors that the same call on tensors with values might not raise."""

_CERTAIN = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)
"""Kinds of errors that shapes, types and arguments raise. An `assert` may have asked for a value, and says nothing."""

_CERTAIN_OF_LOSS = (RuntimeError, ValueError, IndexError)
"""A custom loss may lack an attribute that its `weight` or `attach` sets, and neither is called here."""


def check_layers(
    plan: Plan, topology: Topology, model: Model, dataset: AnyDataset, dtype: torch.dtype, *, calls_all: bool
) -> str | None:
    """Calls the layers, and the loss with the last one's output, on a micro-batch without values; unless `calls_all`, only the
    layers of stages whose output is sent.

    model: on meta, not to be used again; its layers are called with parameters of `dtype`. Returns a note on what was
    not checked and why, or None. Raises PlanError "boundary-type" for an output that cannot be sent to the next stage; and with
    `calls_all` "layer-fails" with the layer's name and its inputs, "model-buffer-written" for running statistics,
    "model-vocabulary" for a last layer with fewer classes than the data has labels, "loss-fails", and the loss's own errors.
    """
    parts = [layers for _, layers in stage_of(plan, topology, 0, model, by_parameters(model)).stages] if topology.pp > 1 else []
    ends = [layers[-1].name for layers in parts[:-1]]
    if not ends and not calls_all:
        return None
    try:
        fields = meta_micro_batch(plan, dataset)
    except Exception as error:  # a user's data, which may not even be here
        return f"no layer was called, for want of a sample: {_first_line(error)}"
    args: tuple[Any, ...] = ()
    written: list[tuple[str, nn.Module]] = []
    for layer in model.layers:
        if lacking := [name for name in layer.fields if name not in fields]:
            return f"layers were called up to {_words(layer)}: the shape of `{lacking[0]}` is known to the data alone"
        try:
            state = meta_state(layer, dtype, plan.precision.keep)
            args = (meta_output(layer, args, fields, state),)
            if layer.name in ends:
                args = (unflatten(*flatten(args[0], layer.name)),)
            if ends[-1:] == [layer.name] and not calls_all:
                return None
            written += [
                (name, module)
                for name, module in _normalisers_written(layer, state)
                if not is_per_rank(name, model.per_rank_buffers)
            ]
        except SleyError as error:
            diagnostic = error.diagnostics[0]
            if diagnostic.code == "boundary-type":
                raise PlanError(diagnostic.code, diagnostic.message, path=MODEL, hint=diagnostic.hint) from None
            raise
        except Exception as error:
            if not calls_all or not _is_certain(error, _CERTAIN):
                if calls_all:
                    refuse_written(written)
                return f"layers were called up to {_words(layer)}, which needs values or a device: {_first_line(error)}"
            inputs = ", ".join([*map(_shape, args), *(f"{name} {_shape(fields[name])}" for name in layer.fields)])
            message = f"{_words(layer)} fails, given {inputs or 'nothing'}: {_first_line(error)}"
            hint = "its first argument is what the layer before returns; `train-cli run --traceback` shows the way there"
            raise PlanError("layer-fails", message, path=MODEL, hint=formats_hint(error) or hint) from error
    refuse_written(written)
    _check_classes(plan, dataset.info, model.layers[-1], args[0])
    return _check_loss(plan, args[0], fields)


def _check_classes(plan: Plan, info: DataInfo, last: Layer, output: Any) -> None:
    """Raises PlanError "model-vocabulary" if the last layer has fewer classes than the data has labels."""
    config = plan.loss.config
    if not isinstance(config, CrossEntropyConfig) or not isinstance(output, Tensor) or not output.ndim:
        return
    field, count = info.fields.get(config.labels), info.vocab_size
    if field is None or field.ids != "label" or count is None or output.shape[-1] >= count:
        return
    raise PlanError(
        "model-vocabulary",
        f"{_words(last)}, the last one, gives {output.shape[-1]} classes, but the data's labels have {count}",
        path=MODEL,
        hint="let the factory read the number: `def layers(data)`, then `data.vocab_size`",
    )


def _check_loss(plan: Plan, output: Any, fields: Mapping[str, Tensor]) -> str | None:
    """Calls the loss on meta; returns a note if that was not possible. Raises PlanError "loss-fails"."""
    loss = plan.loss.build()
    try:
        with torch.device("meta"):
            loss.loss(output, fields)
    except SleyError as error:
        diagnostic = error.diagnostics[0]
        raise PlanError(diagnostic.code, diagnostic.message, path=diagnostic.path or ("loss",), hint=diagnostic.hint) from None
    except Exception as error:
        if hasattr(loss, "attach") or not _is_certain(error, _CERTAIN_OF_LOSS):
            return f"the loss was not looked at: {_first_line(error)}"
        message = f"the loss fails, given {_shape(output)}: {_first_line(error)}"
        raise PlanError("loss-fails", message, path=("loss",), hint="it is given what the last layer returns") from error
    return None


def _is_certain(error: Exception, kinds: tuple[type[Exception], ...]) -> bool:
    known = isinstance(error, kinds) and not isinstance(error, NotImplementedError)
    return known and not _OF_A_DEVICE.search(str(error))


def _words(layer: Layer) -> str:
    return f"layer `{layer.name}` ({type(layer.module).__name__})"


def _shape(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".rstrip(".: ")


def _normalisers_written(layer: Layer, state: Mapping[str, Tensor]) -> list[tuple[str, nn.Module]]:
    """Returns the running statistics that a call of `layer` wrote, by name, with their modules.

    state: the tensors that the call had as buffers, fresh before it. torch increments the version of their counter alone.
    """
    return [
        (f"{layer.name}.{prefix}{attribute}", module)
        for name, module in layer.module.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
        for prefix in [f"{name}." if name else ""]
        if (count := state.get(f"{prefix}num_batches_tracked")) is not None and count._version > 0
        for attribute, _ in module.named_buffers(recurse=False)
    ]

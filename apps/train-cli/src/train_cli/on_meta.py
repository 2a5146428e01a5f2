"""Calls layers on a micro-batch without values, before a run, to find shapes and dtypes; nothing is computed.

Without a pipeline a layer may return anything. With one, its output must be sendable: `check_boundaries` names the layer before
any process starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sley_core.data.batches import Slices, collate_of
from sley_core.data.dataset import BOUNDARY_FIELDS, is_stream
from sley_core.engine.boundary import flatten, unflatten
from sley_core.engine.stage import by_parameters, stage_of
from sley_core.errors import PlanError, SleyError
from sley_core.model.layers import MODEL
from sley_core.model.tensors import buffer_format, parameter_format

if TYPE_CHECKING:
    from sley_core.data.dataset import AnyDataset
    from sley_core.model.layers import Layer, Model
    from sley_core.plan.plan import Plan
    from sley_core.topology import Topology


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
        found = {}
        for name, length in lengths.items():
            found[name] = torch.zeros(size, length, dtype=getattr(torch, info.fields[name].dtype))
            if name in BOUNDARY_FIELDS:  # positions count up; the boundaries of one document are 0 and its length
                found[name] += torch.arange(length) if length != 2 else torch.tensor([0, info.sequence])
        return found
    if is_stream(dataset):
        raise ValueError("a stream is not opened for it")
    return collate_of(dataset)([dataset[0]] * size)  # type: ignore[index]  # it is no stream


def check_boundaries(plan: Plan, topology: Topology, model: Model, dataset: AnyDataset, dtype: torch.dtype) -> str | None:
    """Calls the layers on meta, and raises PlanError "boundary-type" for the last layer of a stage whose output cannot be sent.

    model: on meta; its layers are called with parameters of `dtype`, and it must not be used again. Returns None, or the text
    of why the check was not possible: a layer's forward may need values.
    """
    if topology.pp == 1:
        return None
    parts = [layers for _, layers in stage_of(plan, topology, 0, model, by_parameters(model)).stages]
    ends = {layers[-1].name for layers in parts[:-1]}
    value: Any = None
    at, why = "the data", None
    try:
        fields = meta_micro_batch(plan, dataset)
        for number, layer in enumerate(layer for part in parts[:-1] for layer in part):
            at = layer.name
            if lacking := [name for name in layer.fields if name not in fields]:
                why = f"the shape of `{lacking[0]}` is known to the data alone"
                break
            value = meta_output(layer, (value,) if number else (), fields, meta_state(layer, dtype, plan.precision.keep))
            if layer.name in ends:
                value = unflatten(*flatten(value, layer.name))
    except SleyError as error:
        found = error.diagnostics[0]
        if found.code == "boundary-type":
            raise PlanError(found.code, found.message, path=MODEL, hint=found.hint) from None
        raise
    except Exception as error:  # the user's forward may not work on meta
        first = str(error).strip().partition("\n")[0]
        why = f"{type(error).__name__}: {first}"
    return why and f"what crosses between stages was not looked at: {at}: {why}"

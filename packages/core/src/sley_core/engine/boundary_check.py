"""What crosses between stages, looked at before a run: layers are called on meta, and what they return must be sendable.

Without a pipeline a layer may return anything. So this is told before processes start, with the layer's name, and not by the
first step of whoever adds a stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sley_core.data.collate import collate_of
from sley_core.data.dataset import is_stream
from sley_core.engine.boundary import flatten, unflatten
from sley_core.engine.layer_costs import by_parameters
from sley_core.engine.stage import stage_of
from sley_core.errors import PlanError, SleyError
from sley_core.model.layers import MODEL

if TYPE_CHECKING:
    from sley_core.data.dataset import AnyDataset
    from sley_core.model.layers import Layer, Model
    from sley_core.plan.plan import Plan
    from sley_core.topology import Topology


def check_boundaries(
    plan: Plan, topology: Topology, model: Model, dataset: AnyDataset, dtype: torch.dtype
) -> str | None:
    """Raises PlanError "boundary-type" for a layer at the end of a stage's part whose output cannot be sent.

    model: on meta; its layers are called, with parameters of `dtype`, and it is not to be used again. Returns why it could
    not be looked at: a layer's forward may need values.
    """
    if topology.pp == 1:
        return None
    parts = [layers for _, layers in stage_of(plan, topology, 0, model, by_parameters(model)).stages]
    ends = {layers[-1].name for layers in parts[:-1]}
    value: Any = None
    at = "the data"
    try:
        fields = _micro_batch(plan, dataset)
        for number, layer in enumerate(layer for part in parts[:-1] for layer in part):
            at = layer.name
            value = _output(layer, (value,) if number else (), fields, dtype)
            if layer.name in ends:
                value = unflatten(*flatten(value, layer.name))
    except SleyError as error:
        found = error.diagnostics[0]
        if found.code == "boundary-type":
            raise PlanError(found.code, found.message, path=MODEL, hint=found.hint) from None
        raise
    except Exception as error:  # a user's code, in a place for which it was not made
        first = str(error).strip().partition("\n")[0]
        return f"what crosses between stages was not looked at: {at}: {type(error).__name__}: {first}"
    return None


def _output(layer: Layer, args: tuple[Any, ...], fields: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    """What `layer` returns, on meta: buffers too, and whatever its forward makes."""
    module: nn.Module = layer.module
    meta = {name: buffer.to("meta") for name, buffer in module.named_buffers()}
    meta |= {name: parameter.to(dtype) for name, parameter in module.named_parameters()}
    named = {name: fields[name] for name in layer.fields}
    with torch.device("meta"):
        return torch.func.functional_call(module, meta, args, named)


def _micro_batch(plan: Plan, dataset: AnyDataset) -> dict[str, Tensor]:
    """A micro-batch of the plan's data, on meta: of what its dataset says, or else of its first sample."""
    info, size = dataset.info, plan.batch.micro_size
    if plan.data.record is not None and info.sequence is not None:
        return {
            name: torch.empty(size, info.sequence, dtype=getattr(torch, field.dtype), device="meta")
            for name, field in info.fields.items()
        }
    if is_stream(dataset):
        raise ValueError("a stream is not opened for it")
    batch = collate_of(dataset)([dataset[0]] * size)  # type: ignore[index]  # it is no stream
    return {name: value.to("meta") for name, value in batch.items()}

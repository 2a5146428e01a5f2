"""Checks before a run what crosses between stages: layers are called on meta, and their outputs must be sendable.

Without a pipeline a layer may return anything. This check names the layer before any process starts; otherwise the first step
of whoever adds a stage would fail.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sley_core.engine.boundary import flatten, unflatten
from sley_core.engine.layer_costs import by_parameters
from sley_core.engine.on_meta import meta_micro_batch, meta_output, meta_state
from sley_core.engine.stage import stage_of
from sley_core.errors import PlanError, SleyError
from sley_core.model.layers import MODEL

if TYPE_CHECKING:
    import torch

    from sley_core.data.dataset import AnyDataset
    from sley_core.model.layers import Model
    from sley_core.plan.plan import Plan
    from sley_core.topology import Topology


def check_boundaries(
    plan: Plan, topology: Topology, model: Model, dataset: AnyDataset, dtype: torch.dtype
) -> str | None:
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
            value = meta_output(
                layer, (value,) if number else (), fields, meta_state(layer, dtype, plan.precision.keep)
            )
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

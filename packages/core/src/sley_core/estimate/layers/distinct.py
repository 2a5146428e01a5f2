"""Which layers of a model cost the same: those of one class, with parameters of the same shapes and the same settings.

What is not known to be plain makes its layer differ from all others (`model/kinds.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sley_core.engine.activations import Keep
from sley_core.model.kinds import kind_of, plain

if TYPE_CHECKING:
    from sley_core.model.layers import Layer, Model
    from sley_core.plan.plan import Plan
    from sley_core.protocols import ActivationPolicy


def layer_keys(plan: Plan, model: Model, policy: ActivationPolicy, fields: Mapping[str, Tensor]) -> list[str]:
    """Returns a key of 16 hexadecimal digits for each layer of `model`, on meta; equal for layers that cost the same.

    fields: a micro-batch. The keys of a plan are those that `train-cli calibrate` found, in any layout with its `micro_size`
    and `sp`.
    """
    last = len(model.layers) - 1
    shapes = sorted((name, tuple(value.shape), str(value.dtype)) for name, value in fields.items())
    precision = plan.precision.compute, plan.precision.gradients
    slices: tuple[Any, ...] = ()
    if plan.parallel.sp > 1 and plan.sequence is not None:
        slices = plan.parallel.sp, plan.sequence.name, plain(plan.sequence.config, "sequence")
    found = []
    for at, layer in enumerate(model.layers):
        loss = (plan.loss.name, plain(plan.loss.config, "loss")) if at == last else None
        ends = at == 0, loss
        treatment = _treatment(plan, policy, layer)
        cost = kind_of(layer.module, layer.name), layer.fields, shapes, precision, ends, treatment
        # A slice's attention looks along the whole sequence, on some of the heads.
        text = repr((*cost, *slices) if slices else cost)
        found.append(hashlib.sha256(text.encode()).hexdigest()[:16])
    return found


def _treatment(plan: Plan, policy: ActivationPolicy, layer: Layer) -> Any:
    """What the activation policy does to the layer: nothing to those that it does not name; else for itself."""
    names = getattr(policy, "names", None)
    if type(policy) is Keep or (isinstance(names, frozenset) and layer.name not in names):
        return None
    chosen = None if isinstance(names, frozenset) else layer.name
    return plan.activations.name, plain(plan.activations.config, "activations"), chosen

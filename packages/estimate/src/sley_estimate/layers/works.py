"""Finds what each layer of a model does: traced on meta, each distinct one once, on what the layer before it hands on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from sley_core.assemble import DTYPES, dtypes
from sley_estimate.layers.operators import LayerWork
from sley_estimate.layers.trace import Value, trace

if TYPE_CHECKING:
    from sley_core.model.layers import Model
    from sley_core.plan.plan import Plan

Traced = dict[tuple[str, object], tuple[LayerWork, Value]]
"""Work and output of layers, by their keys and what they are given."""


def layer_works(
    plan: Plan, model: Model, fields: Mapping[str, Tensor], keys: Sequence[str], known: Traced | None = None
) -> list[LayerWork]:
    """Returns the work of each layer under the plan's policy, in order; layers of one key that are given the same kind of value
    are traced once.

    fields: a micro-batch on meta. keys: of each layer, equal for those that take as much as each other. known: what was traced
    before, which is added to. Raises PlanError "estimate-layer" for a layer that cannot run on meta.
    """
    policy, loss = plan.activations.build([layer.name for layer in model.layers]), plan.loss.build()
    working, gradients = dtypes(plan)[0], DTYPES[plan.precision.gradients]
    known = {} if known is None else known
    found: list[LayerWork] = []
    value: Value | None = None
    for layer, key in zip(model.layers, keys, strict=True):
        place = key, value and value[0]
        if place not in known:
            last = loss if layer is model.layers[-1] else None
            by_steps = plan.run.device != "cuda"
            known[place] = trace(layer, value, fields, policy, last, working, gradients, by_steps=by_steps)
        work, value = known[place]
        found.append(work)
    return found

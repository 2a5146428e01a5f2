"""What each layer of a plan's model takes on a machine: measured where the machine file has it, else counted on meta."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from sley_core.draft import DTYPES, dtypes
from sley_core.estimate.layers.distinct import layer_keys
from sley_core.estimate.layers.operators import LayerWork
from sley_core.estimate.layers.trace import Value, trace
from sley_core.estimate.seconds.layer_seconds import LayerSeconds

if TYPE_CHECKING:
    from sley_core.estimate.machine.tables import MachineFile
    from sley_core.model.layers import Model
    from sley_core.plan.plan import Plan


Traced = dict[tuple[str, object], tuple[LayerWork, Value]]
"""Work and output of layers, by their keys and what they are given."""


@dataclass(frozen=True)
class PricedLayer:
    """A layer's seconds, the bytes that it hands on, and whether they were measured. key: alike for what costs the same."""

    name: str
    key: str
    seconds: LayerSeconds
    output_bytes: int
    is_measured: bool


def measured_layers(
    plan: Plan, model: Model, fields: Mapping[str, Tensor], machine: MachineFile
) -> list[PricedLayer] | None:
    """Returns every layer of `model`, on meta, in order, if the machine file has them all. fields: a micro-batch on meta."""
    policy = plan.activations.build([layer.name for layer in model.layers])
    keys = layer_keys(plan, model, policy, fields)
    known = {table.key: table for table in machine.layers}
    if not known.keys() >= set(keys):
        return None
    return [
        PricedLayer(layer.name, key, LayerSeconds.measured(known[key]), known[key].output_bytes, is_measured=True)
        for layer, key in zip(model.layers, keys, strict=True)
    ]


def priced_layers(plan: Plan, model: Model, fields: Mapping[str, Tensor], machine: MachineFile) -> list[PricedLayer]:
    """Returns every layer of `model`, on meta, in order. fields: a micro-batch on meta.

    Raises PlanError "estimate-layer" for a layer that was not measured and cannot be counted, "machine-matmul" for a product
    of a dtype that the machine file does not have.
    """
    if (whole := measured_layers(plan, model, fields, machine)) is not None:
        return whole
    policy = plan.activations.build([layer.name for layer in model.layers])
    keys = layer_keys(plan, model, policy, fields)
    measured = {table.key: table for table in machine.layers}
    works = layer_works(plan, model, fields, keys)
    found = []
    for layer, key, work in zip(model.layers, keys, works, strict=True):
        table = measured.get(key)
        seconds = LayerSeconds.measured(table) if table else LayerSeconds.computed(work, machine.device)
        found.append(PricedLayer(layer.name, key, seconds, work.output_bytes, is_measured=table is not None))
    return found


def layer_works(
    plan: Plan, model: Model, fields: Mapping[str, Tensor], keys: Sequence[str], known: Traced | None = None
) -> list[LayerWork]:
    """Returns the work of each layer; each distinct one is traced once, on what the layer before it hands on.

    keys: as `layer_keys` gives them. known: what was traced before, which is added to. Raises PlanError "estimate-layer" as
    `trace` does.
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
            known[place] = trace(layer, value, fields, policy, last, working, gradients)
        work, value = known[place]
        found.append(work)
    return found

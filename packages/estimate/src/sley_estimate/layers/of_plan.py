"""Prices each layer of a plan's model on a machine: measured where the machine file has it, else counted on meta, and in
proportion to what it has of the layer under another policy or on other micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_core.errors import SleyError
from sley_estimate.layers.distinct import layer_keys
from sley_estimate.layers.nearest import NearestLayers, Source
from sley_estimate.layers.variants import LayerVariants, Variant
from sley_estimate.layers.works import layer_works
from sley_estimate.search.choices import choices_of
from sley_estimate.seconds.layer_seconds import LayerSeconds

if TYPE_CHECKING:
    from sley_core.model.layers import Model
    from sley_core.plan.plan import Plan
    from sley_estimate.machine.tables import MachineFile


@dataclass(frozen=True)
class PricedLayer:
    """Holds a layer's seconds, the bytes that it hands on, and where the seconds come from. key: equal for layers that take as
    long and as much memory as each other.
    """

    name: str
    key: str
    seconds: LayerSeconds
    output_bytes: int
    source: Source

    @property
    def is_measured(self) -> bool:
        """Returns whether the machine file has these seconds of this very layer."""
        return self.source == "measured"


def measured_layers(plan: Plan, model: Model, fields: Mapping[str, Tensor], machine: MachineFile) -> list[PricedLayer] | None:
    """Returns every layer of `model`, which is on meta, in order, with the machine file's seconds; None unless it has them all.

    fields: a micro-batch on meta.
    """
    policy = plan.activations.build([layer.name for layer in model.layers])
    keys = layer_keys(plan, model, policy, fields)
    known = {table.key: table for table in machine.layers}
    if not known.keys() >= set(keys):
        return None
    return [
        PricedLayer(layer.name, key, LayerSeconds.measured(known[key]), known[key].output_bytes, "measured")
        for layer, key in zip(model.layers, keys, strict=True)
    ]


def priced_layers(plan: Plan, model: Model, fields: Mapping[str, Tensor], machine: MachineFile) -> list[PricedLayer]:
    """Returns every layer of `model`, which is on meta, in order, with its seconds: the machine file's where it has the layer;
    else counted, in proportion to another variant of the layer that it has, or alone.

    fields: a micro-batch on meta. Raises PlanError "estimate-layer" for a layer that was not measured and cannot be counted,
    "machine-matmul" for a product of a dtype that the machine file does not have.
    """
    if (whole := measured_layers(plan, model, fields, machine)) is not None:
        return whole
    policy = plan.activations.build([layer.name for layer in model.layers])
    keys = layer_keys(plan, model, policy, fields)
    works = layer_works(plan, model, fields, keys)
    if machine.layers:
        nearest, variant = _nearest(plan, model, machine)
        priced = nearest.priced(variant, works)
    else:
        starts = machine.engine is not None
        priced = [(LayerSeconds.computed(work, machine.device, starts=starts), "counted") for work in works]
    return [
        PricedLayer(layer.name, key, seconds, work.output_bytes, source)
        for layer, key, work, (seconds, source) in zip(model.layers, keys, works, priced, strict=True)
    ]


def priced_slices(plan: Plan, model: Model, fields: Mapping[str, Tensor], machine: MachineFile) -> list[PricedLayer] | None:
    """Returns every layer of a plan that slices sequences, in order, with its seconds without what slices exchange. None where
    nothing of the model was measured, or not all can be counted: their operators are to be recorded where they run.

    fields: the first slice of a micro-batch, on meta. Raises PlanError "machine-matmul" for a product of a dtype that the
    machine file does not have.
    """
    if (whole := measured_layers(plan, model, fields, machine)) is not None or not machine.layers:
        return whole
    nearest, variant = _nearest(plan, model, machine)
    try:
        works = nearest.variants.works(variant)
    except SleyError:
        return None
    keys = nearest.variants.keys(variant, plan.sequence)
    priced = nearest.priced(variant, works, plan.sequence)
    if not any(source != "counted" for _, source in priced):
        return None
    return [
        PricedLayer(layer.name, key, seconds, work.output_bytes, source)
        for layer, key, work, (seconds, source) in zip(model.layers, keys, works, priced, strict=True)
    ]


def _nearest(plan: Plan, model: Model, machine: MachineFile) -> tuple[NearestLayers, Variant]:
    """Returns what prices the plan's layers in any variant by those that the machine file has, and the plan's own variant."""
    choices = choices_of(plan)
    dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
    nearest = NearestLayers(LayerVariants(plan, model, dataset), machine, choices)
    return nearest, Variant(choices.policies[0], plan.batch.micro_size, plan.parallel.sp)

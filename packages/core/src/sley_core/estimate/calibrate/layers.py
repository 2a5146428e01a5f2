"""Times each distinct layer of a plan, one at a time, for the table `[[layers]]` of a machine file."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sley_core.comm.groups import imagined
from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_core.draft import DTYPES, draft_model, dtypes
from sley_core.engine.layer_bench import Handed, LayerBench
from sley_core.engine.on_meta import meta_micro_batch
from sley_core.estimate.layers.distinct import layer_keys

if TYPE_CHECKING:
    from sley_core.comm.device import Device
    from sley_core.plan.plan import Plan
    from sley_core.protocols import SequenceCommunicator

REPETITIONS = 15
"""Of each layer: a machine file is made once, and read often."""


def measure_layers(plan: Plan, device: Device) -> list[dict[str, Any]]:
    """Returns a table for each distinct layer of the plan's model, timed alone on `device` on a micro-batch of the plan's data.

    Layers of one key are timed once. Of a plan that slices sequences they are those of the first slice: their attention sees as
    many positions as in a run, and what it would exchange is not among their seconds. Raises what the plan's data and layers
    raise.
    """
    dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
    model = draft_model(plan, dataset.info)
    policy = plan.activations.build([layer.name for layer in model.layers])
    keys = layer_keys(plan, model, policy, meta_micro_batch(plan, dataset))
    if plan.sequence is not None and plan.parallel.sp > 1:
        attention: SequenceCommunicator = plan.sequence.build(imagined("sp", plan.parallel.sp))
        attention.attach(model.layers)  # of a model that nobody else has
    tables: dict[str, dict[str, Any]] = {}
    handed: dict[str, Handed] = {}
    value: Handed | None = None
    with device.random_state_kept():
        gradients = DTYPES[plan.precision.gradients]
        bench = LayerBench(plan, device, model, dataset, dtypes(plan)[0], gradients, REPETITIONS)
        for layer, key in zip(model.layers, keys, strict=True):
            if key not in tables:
                times, handed[key] = bench.time(layer, value, split=True)
                output_bytes = sum(leaf.num_bytes for leaf in handed[key][0].leaves)
                tables[key] = {"key": key, "name": layer.name, "output_bytes": output_bytes, **asdict(times)}
            value = handed[key]
    return list(tables.values())

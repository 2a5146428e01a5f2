"""Times each distinct layer of a plan, one at a time, for the table `[[layers]]` of a machine file."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sley_core.comm.echo import Echo, NotImaginedError
from sley_core.comm.groups import imagined
from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_core.draft import DTYPES, draft_model, dtypes
from sley_core.engine.layer_bench import Handed, LayerBench
from sley_core.engine.on_meta import meta_micro_batch
from sley_core.errors import PlanError
from sley_core.estimate.layers.distinct import layer_keys

if TYPE_CHECKING:
    from sley_core.comm.device import Device
    from sley_core.plan.plan import Component, Plan
    from sley_core.protocols import SequenceCommunicator

REPETITIONS = 15
"""Of each layer: a machine file is made once, and read often."""


def measure_layers(plan: Plan, device: Device) -> list[dict[str, Any]]:
    """Returns a table for each distinct layer of the plan's model, timed alone on `device` on a micro-batch of the plan's data.

    Layers of one key are timed once. Of a plan that slices sequences they are those of the first slice: their attention sees as
    many positions as in a run, and what it would exchange is not among their seconds. Raises what the plan's data and layers
    raise, and PlanError "calibrate-slice" for an attention that asks what only other ranks can answer.
    """
    sequence = plan.sequence if plan.parallel.sp > 1 else None
    if sequence is None:
        return _timed(plan, device, None)
    try:
        return _timed(plan, device, sequence)
    except NotImaginedError as error:
        attention = f'the attention of `[sequence] use = "{sequence.name}"`'
        message = f"{attention} {error}, and a slice is timed where there is no other rank"
        hint = (
            "let the attention exchange by `group.transport()`, or by functions of `sley_core.api.comm` that send "
            "before they receive; a machine file without these layers is made by leaving out `--plan`"
        )
        raise PlanError.many([plan.diagnostic("calibrate-slice", message, ("sequence", "use"), hint)]) from error


def _timed(plan: Plan, device: Device, sequence: Component | None) -> list[dict[str, Any]]:
    """Returns the tables. sequence: the attention of slices, where sequences are sliced."""
    dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
    model = draft_model(plan, dataset.info)
    policy = plan.activations.build([layer.name for layer in model.layers])
    keys = layer_keys(plan, model, policy, meta_micro_batch(plan, dataset))
    echo = Echo(plan.parallel.sp, device)
    if sequence is not None:
        attention: SequenceCommunicator = sequence.build(imagined("sp", echo, plan.parallel.sp))
        attention.attach(model.layers)  # of a model that nobody else has
    tables: dict[str, dict[str, Any]] = {}
    handed: dict[str, Handed] = {}
    value: Handed | None = None
    with device.random_state_kept():
        gradients = DTYPES[plan.precision.gradients]
        bench = LayerBench(plan, device, model, dataset, dtypes(plan)[0], gradients, REPETITIONS, echo.spans)
        for layer, key in zip(model.layers, keys, strict=True):
            if key not in tables:
                times, handed[key] = bench.time(layer, value, split=True)
                output_bytes = sum(leaf.num_bytes for leaf in handed[key][0].leaves)
                tables[key] = {"key": key, "name": layer.name, "output_bytes": output_bytes, **asdict(times)}
            value = handed[key]
    return list(tables.values())

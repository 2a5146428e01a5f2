"""Measures a machine: its device and host, links if several ranks measure, and each distinct layer of a plan."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sley_core.assemble import DTYPES, build_meta_model, weight_dtypes
from sley_core.comm.device import Device
from sley_core.comm.world import World
from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_core.plan.plan import Plan
from sley_core.process import keep_freed_memory
from sley_estimate.calibrate.bench import LayerBench, call_on_ranks
from sley_estimate.calibrate.device import measure_device, measure_host
from sley_estimate.calibrate.engine import measure_engine
from sley_estimate.calibrate.links import measure_links
from sley_estimate.layers.trace import Value
from sley_estimate.layers.variants import apply_variant, layer_keys
from sley_estimate.machine import MACHINE_FORMAT, MachineFile, machine_from_dict
from sley_estimate.search.layouts import list_choices
from train_cli.meta_model import meta_micro_batch

REPETITIONS = 15  # of each layer


def measure_machine(world: World, plan: Plan | None, timeout_s: float) -> MachineFile | None:
    """Returns the machine on rank 0 of `world`, and None on other ranks. It is a collective of several ranks, which also
    measures links.

    Rank 0 measures the device and its layers. On CPUs, where ranks share memory and caches, all ranks measure at the same time,
    and the process keeps freed memory from then on unless the plan disables that. plan: the plan whose layers are timed.
    """
    is_cpu = world.device.type == "cpu"
    if is_cpu and (plan is None or plan.run.keep_freed_memory):
        keep_freed_memory()
    links = measure_links(world, timeout_s) if world.size > 1 else None

    def measure_tables() -> dict[str, Any]:
        tables: dict[str, Any] = {"device": measure_device(world.device), "host": measure_host(world.device)}
        if world.device.is_async:
            tables["engine"] = measure_engine(world.device, plan)
        if plan is not None:
            tables["layers"] = measure_layers(plan, world.device)
        return tables

    tables: dict[str, Any] = {"format": MACHINE_FORMAT}
    is_shared = world.size > 1 and is_cpu
    if is_shared or world.rank == 0:
        tables |= call_on_ranks(world, measure_tables, "measure its device and layers") if is_shared else measure_tables()
    if world.rank != 0:
        return None
    if links is not None:
        tables["links"] = links
    return machine_from_dict(tables)


def measure_layers(plan: Plan, device: Device) -> list[dict[str, Any]]:
    """Times each distinct layer of the plan's model on one microbatch of its data with whole sequences. Returns the
    `[[layers]]` tables. Raises the errors of the plan's data and layers.
    """
    policy_text = str(list_choices(plan).policies[0])
    plan = apply_variant(plan, sp=1)
    dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
    model = build_meta_model(plan, dataset.info)
    policy = plan.activations.build([layer.name for layer in model.layers])
    keys = layer_keys(plan, model, policy, meta_micro_batch(plan, dataset))
    gradients, working = DTYPES[plan.precision.gradients], weight_dtypes(plan)[0]
    tables: dict[str, dict[str, Any]] = {}
    outputs: dict[str, Value] = {}
    value: Value | None = None
    with device.preserve_random_state():
        bench = LayerBench(plan, device, model, dataset, working, gradients, REPETITIONS)
        for layer, key in zip(model.layers, keys, strict=True):
            if key not in tables:
                times, outputs[key] = bench.time(layer, value, split=True)
                seconds = {name: value for name, value in asdict(times).items() if value or not name.startswith("host_")}
                output_bytes = sum(leaf.num_bytes for leaf in outputs[key][0].leaves)
                variant = {"activations": policy_text, "micro_size": plan.batch.micro_size}
                tables[key] = {"key": key, "name": layer.name, "output_bytes": output_bytes, **seconds, **variant}
            value = outputs[key]
    return list(tables.values())

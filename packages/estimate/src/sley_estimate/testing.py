"""Helpers for tests of estimates: small machine files, short calibrations, and steps that are simulated without a plan.

machine = machine_from_dict(small_machine(links__ranks_per_host=2, layers=timed_layers(plan, times=2.0)))
with short_calibration():
    machine = measure_machine(world, plan, timeout_s=30)
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

from sley_core.actions.action import Action, LoweredList, Placement
from sley_core.data.batches import open_dataset
from sley_core.data.dataset import DataContext
from sley_core.plan.plan import Plan
from sley_estimate.calibrate import bench, device, links
from sley_estimate.layers.times import LayerSeconds
from sley_estimate.layers.trace import layer_keys, trace_layers
from sley_estimate.machine import Cost, machine_from_dict
from sley_estimate.step.estimate import list_instructions
from sley_estimate.step.simulate import Compute, Instruction, StepTime, simulate_programs
from sley_testing.plans import Tables, changed
from sley_trainer.assemble import build_meta_model
from train_cli.meta_model import meta_micro_batch

_SMALL: Tables = {  # the tables of `small_machine` without changes
    "format": 1,
    "device": {
        "name": "even",
        "kind": "cuda",
        "memory_bandwidth": 1e11,
        "launch_s": 1e-6,
        "matmul": {"fp32": {"flops_per_s": 1e11}, "fp64": {"flops_per_s": 1e11}},
    },
    "links": {"ranks_per_host": 8, "same_host": {"latency_s": 1e-5, "bandwidth": 1e10}},
}


def small_machine(**changes: Any) -> Tables:
    """Returns the tables of a machine with one host of eight devices and no layers. changes: keys to set, as in
    `device__launch_s=0.1`.
    """
    return changed(_SMALL, **changes)


def timed_layers(plan: Plan, times: float = 1.0, host: float = 0.0, launch_s: float = 1e-6) -> list[Tables]:
    """Returns `[[layers]]` tables for the layers of `plan`, as if they had been measured on `small_machine`. times: the
    measured times as a multiple of the computed times. host: the host's times as a multiple of the device's times. launch_s:
    the time in seconds that the launch of one operator takes, which is part of the computed times.
    """
    dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
    model, machine = build_meta_model(plan, dataset.info), machine_from_dict(small_machine(device__launch_s=launch_s))
    fields = meta_micro_batch(plan, dataset)
    keys = layer_keys(plan, model, plan.activations.build([layer.name for layer in model.layers]), fields)
    tables = {}
    for layer, key, work in zip(model.layers, keys, trace_layers(plan, model, fields, keys), strict=True):
        counted = LayerSeconds.from_operators(work, machine.device)
        seconds = {name: times * value for name, value in asdict(counted).items()}
        hosts = {f"host_{name}": host * value for name, value in seconds.items() if not name.startswith("host_")}
        tables[key] = {"key": key, "name": layer.name, "output_bytes": work.output_bytes, **seconds, **hosts}
    return [*tables.values()]


@contextmanager
def short_calibration() -> Iterator[None]:
    """Makes calibration within the block use small tensors and few repetitions. The figures are valid but inaccurate."""
    with ExitStack() as patches:
        for module, name, value in (
            (device, "SIZES", {"cpu": (32, 64)}),
            (device, "MOVED_BYTES", {"cpu": 1 << 20}),
            (device, "REPETITIONS", 3),
            (device, "BUCKET_NUMEL", 1 << 14),
            (device, "WRITTEN_BYTES", {"cpu": 1 << 16}),
            (links, "LARGE_BYTES", 1 << 18),
            (links, "PRODUCT_EDGE", 64),
            (links, "REPETITIONS", 3),
            (bench, "NUM_CALIBRATION_CALLS", 3),
        ):
            patches.enter_context(patch.object(module, name, value))
        yield


def simulate_without_plan(
    lists: Sequence[LoweredList],
    placement: Placement,
    layers: Sequence[Sequence[LayerSeconds]],
    messages: Sequence[Cost],
    final_instructions: Mapping[int, Sequence[Instruction]] | None = None,
) -> StepTime:
    """Returns a simulated step from the lowered action list of each stage, without a plan. layers: the times of the layers at
    each position. messages: the cost of a message between positions i and i + 1. final_instructions: instructions to append to
    a stage's program, by stage.
    """

    def program(stage: int, entries: LoweredList) -> Iterator[Instruction]:
        def compute(action: Action) -> Iterator[Instruction]:
            chunk_layers = layers[placement.position(stage, action.chunk)]
            host_s = sum(layer.host_action_s(action.kind) for layer in chunk_layers)
            yield Compute(sum(layer.action_s(action.kind) for layer in chunk_layers), action, host_s)

        yield from list_instructions(stage, entries, placement, messages.__getitem__, compute)
        yield from (final_instructions or {}).get(stage, ())

    return simulate_programs([list(program(stage, entries)) for stage, entries in enumerate(lists)])

"""Measures a machine: its device and host, links if several ranks measure, and each distinct layer of a plan.

the plan's layers ──> its microbatches under other policies ──> other sizes, under all policies ──> ... until the budget ends
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from math import inf
from typing import Any

import torch

from sley_core.assemble import DTYPES, build_meta_model, weight_dtypes
from sley_core.comm.device import Device
from sley_core.comm.world import World
from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_core.errors import SleyError
from sley_core.model.layers import Layer
from sley_core.plan.check import check_plan
from sley_core.plan.plan import Plan
from sley_core.process import keep_freed_memory
from sley_core.records import ActivationPolicyRecord
from sley_estimate.calibrate.bench import LayerBench, call_on_ranks
from sley_estimate.calibrate.device import measure_device, measure_host
from sley_estimate.calibrate.engine import measure_engine
from sley_estimate.calibrate.links import measure_links
from sley_estimate.layers.trace import Value
from sley_estimate.layers.variants import Variant, apply_variant, layer_keys
from sley_estimate.machine import MACHINE_FORMAT, MachineFile, machine_from_dict
from sley_estimate.search.layouts import Choice, list_choices
from train_cli.meta_model import meta_micro_batch

BUDGET_S = 50.0  # of a calibration, unless the plan's own layers take longer
REPETITIONS = 15  # of each layer in the plan's own variant
VARIANT_REPETITIONS = 7  # of each layer in another variant


def measure_machine(
    world: World, plan: Plan | None, timeout_s: float, budget_s: float = BUDGET_S
) -> tuple[MachineFile, Sequence[str]] | None:
    """Returns the machine and a text per variant of layers without a measurement on rank 0 of `world`, and None on other ranks.
    It is a collective of several ranks, which also measures links.

    Rank 0 measures the device and its layers. On CPUs, where ranks share memory and caches, all ranks measure at the same time,
    and the process keeps freed memory from then on unless the plan disables that. plan: the plan whose layers are timed.
    budget_s: the seconds after which no further variant starts, by each rank's own clock.
    """
    until_s = time.monotonic() + budget_s
    is_cpu = world.device.type == "cpu"
    if is_cpu and (plan is None or plan.run.keep_freed_memory):
        keep_freed_memory()
    links = measure_links(world, timeout_s) if world.size > 1 else None

    def measure_tables() -> dict[str, Any]:
        tables: dict[str, Any] = {"device": measure_device(world.device), "host": measure_host(world.device)}
        if world.device.is_async:
            tables["engine"] = measure_engine(world.device, plan)
        if plan is not None:
            tables["layers"], tables["left out"] = measure_layers(plan, world.device, until_s)
        return tables

    tables: dict[str, Any] = {"format": MACHINE_FORMAT}
    is_shared = world.size > 1 and is_cpu
    if is_shared or world.rank == 0:
        tables |= call_on_ranks(world, measure_tables, "measure its device and layers") if is_shared else measure_tables()
    if world.rank != 0:
        return None
    left_out = tables.pop("left out", ())
    if links is not None:
        tables["links"] = links
    return machine_from_dict(tables), left_out


def measure_layers(plan: Plan, device: Device, until_s: float = 0.0) -> tuple[list[dict[str, Any]], list[str]]:
    """Times each distinct layer of the plan's model on one microbatch of its data with whole sequences, and then in the other
    variants of a search. Returns the `[[layers]]` tables, and a text for each skipped variant.

    until_s: the value of `time.monotonic` after which no other variant starts; 0 to time none. Raises the errors of the plan's
    data and layers.
    """
    bench = VariantBench(plan, device)
    bench.time_variant(bench.plan_variant, REPETITIONS)
    left_out = []
    for variant in unmeasured_variants(plan) if until_s else ():
        try:
            bench.time_variant(variant, VARIANT_REPETITIONS, until_s)
        except _TimeIsUpError:
            reason = "the time budget was used up"
        except (MemoryError, torch.OutOfMemoryError):
            reason = "its layers do not fit in memory"
        except SleyError as error:
            reason = error.diagnostics[0].message
        else:
            continue
        left_out.append(f"`{variant.policy}` with microbatches of {variant.micro_size}: {reason}")
    return bench.tables, left_out


def unmeasured_variants(plan: Plan) -> Iterator[Variant]:
    """Yields the variants of the plan's layers that a search may try, except the plan's own: first other policies, then other
    sizes.
    """
    policies = [choice for choice in list_choices(plan).policies if _is_allowed(plan, choice)]
    micro_size = plan.batch.micro_size
    sizes = [micro_size, *other_micro_sizes(micro_size, plan.batch.global_size)]
    yield from islice((Variant(policy, size) for size in sizes for policy in policies), 1, None)


def other_micro_sizes(micro_size: int, max_size: int) -> list[int]:
    """Returns microbatch sizes up to `max_size` other than `micro_size`: 4, 1/4 and 16 times the power of two below it."""
    power = 1 << (micro_size.bit_length() - 1)
    return [
        size for size in dict.fromkeys((4 * power, max(1, power // 4), 16 * power)) if size != micro_size and size <= max_size
    ]


def _is_allowed(plan: Plan, choice: Choice) -> bool:
    """Returns whether a policy may be timed: the plan's own policy, or one without copies that passes the plan's checks."""
    plan_policy = plan.activations
    if (choice.name, choice.config) == (plan_policy.name, plan_policy.config):
        return True
    if not isinstance(choice.record, ActivationPolicyRecord) or choice.copies:
        return False
    world = plan.world()
    try:
        plan_problems = {(problem.code, problem.message) for problem in check_plan(plan, world)}
        problems = check_plan(apply_variant(plan, policy=choice), world)
    except SleyError:
        return False
    return all((problem.code, problem.message) in plan_problems for problem in problems)


class _TimeIsUpError(Exception):
    """Raised when the time budget is over."""


class VariantBench:
    """Times the layers of `plan` variant by variant, equal layers once. tables: the results. plan_variant: the plan's own
    variant.
    """

    def __init__(self, plan: Plan, device: Device) -> None:
        self.plan = plan
        self.device = device
        self.plan_variant = Variant(list_choices(plan).policies[0], plan.batch.micro_size)
        self.tables: list[dict[str, Any]] = []
        self._keys: set[str] = set()
        self._outputs: dict[str, Value] = {}
        self._size = 0
        self._repetition_s: dict[str, tuple[float, int]] = {}

    def time_variant(self, variant: Variant, repetitions: int, until_s: float = inf) -> None:
        """Times the layers of a variant whose keys are not in `tables`. Raises the errors of `measure_layers`, and
        _TimeIsUpError if that would end after `until_s`.
        """
        if time.monotonic() > until_s:
            raise _TimeIsUpError
        plan = apply_variant(self.plan, policy=variant.policy, micro_size=variant.micro_size, sp=1)
        dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
        model = build_meta_model(plan, dataset.info)
        policy = plan.activations.build([layer.name for layer in model.layers])
        keys = layer_keys(plan, model, policy, meta_micro_batch(plan, dataset))
        if self._keys >= set(keys):
            return
        if variant.micro_size != self._size:  # the inputs have another shape
            self._size, self._outputs = variant.micro_size, {}
        value: Value | None = None
        with self.device.preserve_random_state():
            gradients, working = DTYPES[plan.precision.gradients], weight_dtypes(plan)[0]
            bench = LayerBench(plan, self.device, model, dataset, working, gradients, repetitions)
            for layer, key in zip(model.layers, keys, strict=True):
                if key not in self._outputs:
                    self._time_layer(bench, layer, key, value, variant, until_s)
                value = self._outputs[key]

    def _time_layer(
        self, bench: LayerBench, layer: Layer, key: str, value: Value | None, variant: Variant, until_s: float
    ) -> None:
        """Times one layer. Raises _TimeIsUpError if its earlier seconds per sample predict an end after `until_s`."""
        repetition_s, size = self._repetition_s.get(layer.name, (0.0, variant.micro_size))
        start_s = time.monotonic()
        if start_s + repetition_s * max(1.0, variant.micro_size / size) * bench.repetitions > until_s:
            raise _TimeIsUpError
        times, self._outputs[key] = bench.time(layer, value, split=True)
        self._repetition_s[layer.name] = (time.monotonic() - start_s) / bench.repetitions, variant.micro_size
        if key not in self._keys:
            self._keys.add(key)
            output_bytes = sum(leaf.num_bytes for leaf in self._outputs[key][0].leaves)
            layout = {"activations": str(variant.policy), "micro_size": variant.micro_size}
            seconds = {name: value for name, value in asdict(times).items() if value or not name.startswith("host_")}
            self.tables.append({"key": key, "name": layer.name, "output_bytes": output_bytes, **seconds, **layout})

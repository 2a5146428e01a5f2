"""Twenty plans of one process take the bytes and the seconds on one device that were estimated; a small one on a CPU, too.

The large ones are for a device: gigabytes, so that what an allocator rounds up does not decide, and steps of 0.03 to 0.5 s on
one. The small ones, of the same kinds, are megabytes, for a CPU. On CUDA the allocator tells the most bytes, without cuBLAS's
workspaces; on a CPU its events do. Layers are timed and steps are taken in turn, since a host that others use is faster at one
time than at another.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.device import Device
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_core.plan.plan import Plan
from sley_core.records import steps_on_host
from sley_estimate.bytes.rank import STEPS, rank_bytes
from sley_estimate.calibrate.device import measure_device, measure_host, measure_host_bandwidth
from sley_estimate.calibrate.engine import mean_step_s, measure_engine
from sley_estimate.calibrate.layers import measure_layers
from sley_estimate.machine import MACHINE_FORMAT, MachineFile, machine_from_dict
from sley_estimate.step.estimate import estimate_seconds
from sley_estimate.testing import short_calibration
from sley_testing.live_bytes import Figure, memory_profile, note, peak_bytes
from sley_testing.plans import Tables, changed, small_plan

BYTES, SECONDS = 0.03, 0.10
"""How far the peak and a step may be from the estimate, relative."""


# -- the plans ---------------------------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """A decoder and its sequences."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    sequence: int
    tied: bool = False


WIDE = Shape(3, 2048, 16, 16, 2048)
DEEP = Shape(10, 1024, 16, 16, 1024)
GROUPED = Shape(4, 1536, 12, 4, 2048, tied=True)

VOCABULARY, SMALL_VOCABULARY = 16384, 512
SMALLER = 16
"""Of widths; sequences are as much shorter."""

FEWER = 4
"""Samples of a microbatch of a small one."""

KEEP, RECOMPUTE, HALF = {}, {"use": "core.recompute"}, {"use": "core.recompute", "fraction": 0.5}
SELECTIVE, HOST = {"use": "memory.selective"}, {"use": "memory.host"}
STATES = [{"use": "memory.optimizer_states", "when": "between_steps"}]
OPTIMIZER = [{"use": "memory.host_optimizer"}]
SGD = {"use": "core.sgd", "lr": 1e-4, "momentum": 0.9}
PACKED = {"documents": "pack"}


class Kind(NamedTuple):
    """One plan. micro: samples of a microbatch. count: microbatches of a step. more: what tables of it have besides."""

    compute: str
    shape: Shape
    micro: int
    count: int
    activations: dict[str, Any]
    offload: list[dict[str, Any]] | None = None
    more: dict[str, Any] | None = None


KINDS: dict[str, Kind] = {
    "wide": Kind("bf16", WIDE, 4, 1, KEEP),
    "wide, four microbatches": Kind("bf16", WIDE, 4, 4, KEEP),
    "wide, recomputed": Kind("bf16", WIDE, 8, 2, RECOMPUTE),
    "wide, selective": Kind("bf16", WIDE, 8, 2, SELECTIVE),
    "wide, activations on the host": Kind("bf16", WIDE, 4, 2, HOST),
    "wide, states away between steps": Kind("bf16", WIDE, 4, 4, KEEP, STATES),
    "wide, recomputed, states away": Kind("bf16", WIDE, 8, 4, RECOMPUTE, STATES),
    "wide, optimizer on the host": Kind("bf16", WIDE, 4, 2, KEEP, OPTIMIZER),
    "deep": Kind("bf16", DEEP, 8, 1, KEEP),
    "deep, half recomputed": Kind("bf16", DEEP, 16, 2, HALF),
    "deep, selective, documents": Kind("bf16", DEEP, 8, 2, SELECTIVE, None, {"data": PACKED}),
    "deep, activations on the host": Kind("bf16", DEEP, 8, 1, HOST),
    "deep, activations and states away": Kind("bf16", DEEP, 8, 2, HOST, STATES),
    "grouped and tied": Kind("bf16", GROUPED, 4, 2, KEEP),
    "grouped, recomputed, SGD, not clipped": Kind("bf16", GROUPED, 8, 1, RECOMPUTE, None, {"optimizer": SGD}),
    "grouped, documents": Kind("bf16", GROUPED, 4, 2, KEEP, None, {"data": PACKED}),
    "fp32, wide": Kind("fp32", WIDE, 2, 1, KEEP),
    "fp32, wide, recomputed": Kind("fp32", WIDE, 4, 1, RECOMPUTE),
    "fp32, deep, selective, states away": Kind("fp32", DEEP, 4, 2, SELECTIVE, STATES),
    "fp32, grouped, activations on the host": Kind("fp32", GROUPED, 2, 1, HOST),
}
assert len(KINDS) == 20


def tables(kind: Kind, device: str, *, is_large: bool) -> Tables:
    """The plan of a kind on `device`. It reads Python's own library as text."""
    less = 1 if is_large else SMALLER
    shape, more = kind.shape, kind.more or {}
    micro = kind.micro if is_large else max(1, kind.micro // FEWER)
    model = {"use": "models.llama", "num_layers": shape.layers, "hidden": shape.hidden // less, "heads": shape.heads}
    model |= {"kv_heads": shape.kv_heads, "vocab_size": VOCABULARY if is_large else SMALL_VOCABULARY}
    data = {"use": "data.text", "source": "python-stdlib", "sequence": shape.sequence // less, "documents": "cut"}
    offload = [table if is_large else table | {"bucket_mb": 0.5} for table in kind.offload or ()]
    return changed(
        small_plan(),
        run={"name": "estimated", "steps": 100, "device": device},
        model=model | {"tie_embeddings": shape.tied},
        data=data | more.get("data", {}),
        batch={"global_size": micro * kind.count, "micro_size": micro},
        optimizer=more.get("optimizer", {"use": "core.adamw", "lr": 1e-4, "clip_norm": 1.0}),
        precision={"compute": kind.compute},
        activations=kind.activations or None,
        offload=offload or None,
    )


# -- estimates and runs ------------------------------------------------------------------------------------------------


@contextmanager
def measured_peak(device: Device, result: list[int]) -> Iterator[None]:
    """Appends the most bytes at once within the block, above those before it."""
    if device.type != "cuda":
        with memory_profile() as profile:
            yield
        result.append(peak_bytes(profile))
        return

    def clear_workspaces() -> None:
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()

    gc.collect()
    clear_workspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield
    torch.cuda.synchronize()
    peak, behind = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated()
    clear_workspaces()
    result.append(peak - (behind - torch.cuda.memory_allocated()))


@dataclass(frozen=True)
class Compared:
    """An estimate and a run. states, real_states: bytes by part between two steps. seconds, real_seconds: of a step, per
    turn.
    """

    name: str
    num_bytes: int
    peak: int
    states: dict[str, int]
    real_states: dict[str, int]
    seconds: Sequence[float]
    real_seconds: Sequence[float]

    def figures(self) -> list[Figure]:
        bytes_error = self.num_bytes / self.peak - 1
        seconds_error = median(self.seconds) / median(self.real_seconds) - 1
        turns = ", ".join(f"{one / real - 1:+.1%}" for one, real in zip(self.seconds, self.real_seconds, strict=True))
        of_seconds = f"{seconds_error:+.1%} of {median(self.real_seconds):.4f} s (in turn {turns})"
        return [
            Figure(
                f"peak bytes: {self.name}",
                f"{bytes_error:+.1%} of {self.peak / 2**20:,.0f} MiB",
                f"within {BYTES:.0%}",
                is_met=abs(bytes_error) <= BYTES,
            ),
            Figure(f"step seconds: {self.name}", of_seconds, f"within {SECONDS:.0%}", is_met=abs(seconds_error) <= SECONDS),
        ]


def measured_tables(device: Device) -> dict[str, Any]:
    """The tables of this machine's file, without engine and layers."""
    return {"format": MACHINE_FORMAT, "device": measure_device(device), "host": measure_host(device)}


def machine_for(device: Device, plan: Plan, known: dict[str, Any]) -> MachineFile:
    """This machine with the layers of `plan` as they are measured now, and what a host that runs ahead takes now."""
    now: dict[str, Any] = {"layers": measure_layers(plan, device)}
    if device.is_async:
        now["engine"] = measure_engine(device, plan)
        if any(steps_on_host(manager.record) for manager in plan.offload):
            now["host"] = known["host"] | {"memory_bandwidth": measure_host_bandwidth(device)}
    return machine_from_dict(known | now)


def compare(
    name: str, plan: Plan, machine_of: Callable[[Device], MachineFile], num_steps: int = 5, num_rounds: int = 3
) -> Compared:
    estimated = rank_bytes(plan, 0, 1)
    peak, seconds, real_seconds = list[int](), list[float](), list[float]()
    with World.alone(plan.run.device) as world, ExitStack() as stack:
        with measured_peak(world.device, peak):
            run = stack.enter_context(assemble(plan, world))
            for _ in range(STEPS):
                run.step()
            states = dict(run.memory.bytes)
        for _ in range(num_rounds):
            seconds.append(estimate_seconds(plan, 1, machine_of(world.device)).step.seconds)
            real_seconds.append(mean_step_s(run, num_steps))
    num_bytes = estimated.peak - estimated.batch
    return Compared(name, num_bytes, peak[0], dict(estimated.states), states, seconds, real_seconds)


@pytest.mark.campaign
@pytest.mark.parametrize("name", KINDS)
def test_a_small_one_takes_what_was_estimated_of_a_cpu(name: str) -> None:
    """Its bytes; its seconds say nothing, since calibration is short."""
    plan = plan_from_dict(tables(KINDS[name], "cpu", is_large=False))
    with World.alone("cpu") as world, short_calibration():
        machine = machine_for(world.device, plan, measured_tables(world.device))
    found = compare(name, plan, lambda _: machine, num_steps=1, num_rounds=1)
    of_bytes, of_seconds = found.figures()
    print(of_bytes, of_seconds)
    assert found.states == found.real_states
    assert of_bytes.is_met


@pytest.fixture(scope="module")
def known():
    with World.alone("cuda") as world:
        return measured_tables(world.device)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.timeout(300)  # the first one measures the machine
@pytest.mark.parametrize("name", KINDS)
def test_a_large_one_takes_what_was_estimated_of_the_device(name: str, known) -> None:
    """Bytes of parts between two steps exactly; the peak and the seconds nearly so."""
    plan = plan_from_dict(tables(KINDS[name], "cuda", is_large=True))
    found = compare(name, plan, lambda device: machine_for(device, plan, known))
    for figure in found.figures():
        print(figure)
        note(figure)
    assert found.states == found.real_states
    assert all(figure.is_met is not False for figure in found.figures())

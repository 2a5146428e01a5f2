"""Tests that 20 plans of one process need the estimated bytes and seconds on a CUDA device.

The plans need gigabytes, so that the rounding of the allocator does not matter, and steps of 0.03 to 0.5 s. The peak excludes
the workspaces of cuBLAS. Layers are timed and steps are run in turns, since the speed of a shared host varies.
"""

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any, NamedTuple

import pytest
import torch

from sley_core.comm.device import Device
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_core.plan.plan import Plan
from sley_core.records import steps_on_host
from sley_estimate.bytes.rank import STEPS, run_rank
from sley_estimate.calibrate.bench import measure_layers
from sley_estimate.calibrate.device import mean_step_s, measure_device, measure_engine, measure_host, measure_host_bandwidth
from sley_estimate.machine import MACHINE_FORMAT, MachineFile, machine_from_dict
from sley_estimate.step.estimate import estimate_plan
from sley_testing.live_bytes import Figure, note_figure
from sley_testing.plans import Tables, changed, small_plan
from sley_trainer.assemble import assemble

BYTES, SECONDS = 0.03, 0.10
"""The allowed relative errors of the peak and of a step."""

NUM_STEPS, NUM_ROUNDS = 5, 3


# -- the plans ---------------------------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """Describes a decoder and its sequences."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    sequence: int
    tied: bool = False


WIDE = Shape(3, 2048, 16, 16, 2048)
DEEP = Shape(10, 1024, 16, 16, 1024)
GROUPED = Shape(4, 1536, 12, 4, 2048, tied=True)

VOCABULARY = 16384

KEEP, RECOMPUTE, HALF = {}, {"use": "core.recompute"}, {"use": "core.recompute", "fraction": 0.5}
SELECTIVE, HOST = {"use": "memory.selective"}, {"use": "memory.host"}
STATES = [{"use": "memory.optimizer_states", "when": "between_steps"}]
OPTIMIZER = [{"use": "memory.host_optimizer"}]
SGD = {"use": "core.sgd", "lr": 1e-4, "momentum": 0.9}
PACKED = {"documents": "pack"}


class Case(NamedTuple):
    """Describes a plan. micro: the samples of a microbatch. count: the microbatches of a step. changes: changes of tables."""

    compute: str
    shape: Shape
    micro: int
    count: int
    activations: dict[str, Any]
    offload: list[dict[str, Any]] | None = None
    changes: dict[str, Any] | None = None


CASES: dict[str, Case] = {
    "wide": Case("bf16", WIDE, 4, 1, KEEP),
    "wide, four microbatches": Case("bf16", WIDE, 4, 4, KEEP),
    "wide, recomputed": Case("bf16", WIDE, 8, 2, RECOMPUTE),
    "wide, selective": Case("bf16", WIDE, 8, 2, SELECTIVE),
    "wide, activations on the host": Case("bf16", WIDE, 4, 2, HOST),
    "wide, states away between steps": Case("bf16", WIDE, 4, 4, KEEP, STATES),
    "wide, recomputed, states away": Case("bf16", WIDE, 8, 4, RECOMPUTE, STATES),
    "wide, optimizer on the host": Case("bf16", WIDE, 4, 2, KEEP, OPTIMIZER),
    "deep": Case("bf16", DEEP, 8, 1, KEEP),
    "deep, half recomputed": Case("bf16", DEEP, 16, 2, HALF),
    "deep, selective, documents": Case("bf16", DEEP, 8, 2, SELECTIVE, None, {"data": PACKED}),
    "deep, activations on the host": Case("bf16", DEEP, 8, 1, HOST),
    "deep, activations and states away": Case("bf16", DEEP, 8, 2, HOST, STATES),
    "grouped and tied": Case("bf16", GROUPED, 4, 2, KEEP),
    "grouped, recomputed, SGD, not clipped": Case("bf16", GROUPED, 8, 1, RECOMPUTE, None, {"optimizer": SGD}),
    "grouped, documents": Case("bf16", GROUPED, 4, 2, KEEP, None, {"data": PACKED}),
    "fp32, wide": Case("fp32", WIDE, 2, 1, KEEP),
    "fp32, wide, recomputed": Case("fp32", WIDE, 4, 1, RECOMPUTE),
    "fp32, deep, selective, states away": Case("fp32", DEEP, 4, 2, SELECTIVE, STATES),
    "fp32, grouped, activations on the host": Case("fp32", GROUPED, 2, 1, HOST),
}
assert len(CASES) == 20


def tables(case: Case) -> Tables:
    """Returns the plan of a case. It reads Python's standard library as text."""
    shape, changes = case.shape, case.changes or {}
    model = {"use": "models.llama", "num_layers": shape.layers, "hidden": shape.hidden, "heads": shape.heads}
    model |= {"kv_heads": shape.kv_heads, "vocab_size": VOCABULARY, "tie_embeddings": shape.tied}
    data = {"use": "data.text", "source": "python-stdlib", "sequence": shape.sequence, "documents": "cut"}
    return changed(
        small_plan(),
        run={"name": "estimated", "steps": 100, "device": "cuda"},
        model=model,
        data=data | changes.get("data", {}),
        batch={"global_size": case.micro * case.count, "micro_size": case.micro},
        optimizer=changes.get("optimizer", {"use": "core.adamw", "lr": 1e-4, "clip_norm": 1.0}),
        precision={"compute": case.compute},
        activations=case.activations or None,
        offload=case.offload,
    )


# -- estimates and runs ------------------------------------------------------------------------------------------------


@contextmanager
def measured_peak(result: list[int]) -> Iterator[None]:
    """Appends the peak bytes within the block, above those before it."""

    def clear_workspaces() -> None:
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()

    gc.collect()
    clear_workspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    initial_bytes = torch.cuda.memory_allocated()
    yield
    torch.cuda.synchronize()
    peak, final_bytes = torch.cuda.max_memory_allocated() - initial_bytes, torch.cuda.memory_allocated()
    clear_workspaces()
    result.append(peak - (final_bytes - torch.cuda.memory_allocated()))


@pytest.fixture(scope="module")
def machine_tables() -> dict[str, Any]:
    """Returns the tables of this machine's file, without engine and layers."""
    with World.alone("cuda") as world:
        device = world.device
        return {"format": MACHINE_FORMAT, "device": measure_device(device), "host": measure_host(device)}


def measure_layers_and_host(device: Device, plan: Plan, machine_tables: dict[str, Any]) -> MachineFile:
    """Returns this machine with the current seconds of the layers of `plan` and of its host."""
    changes: dict[str, Any] = {"layers": measure_layers(plan, device), "engine": measure_engine(device, plan)}
    if any(steps_on_host(manager.record) for manager in plan.offload):
        changes["host"] = machine_tables["host"] | {"memory_bandwidth": measure_host_bandwidth(device)}
    return machine_from_dict(machine_tables | changes)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.timeout(300)  # the first one measures the machine
@pytest.mark.parametrize("name", CASES)
def test_estimate_equals_run_on_gpu(name: str, machine_tables: dict[str, Any]) -> None:
    """Expects exact bytes of parts between two steps, and a peak and seconds within BYTES and SECONDS."""
    plan = plan_from_dict(tables(CASES[name]))
    estimated = run_rank(plan, 0, 1)[0]
    peaks, seconds, real_seconds = list[int](), list[float](), list[float]()
    with World.alone("cuda") as world, ExitStack() as stack:
        with measured_peak(peaks):
            run = stack.enter_context(assemble(plan, world))
            for _ in range(STEPS):
                run.step()
            states = dict(run.memory.bytes)
        for _ in range(NUM_ROUNDS):
            machine = measure_layers_and_host(world.device, plan, machine_tables)
            seconds.append(estimate_plan(plan, 1, machine).step.seconds)
            real_seconds.append(mean_step_s(run, NUM_STEPS))
    (peak,) = peaks
    bytes_error = (estimated.peak - estimated.batch) / peak - 1
    seconds_error = median(seconds) / median(real_seconds) - 1
    turns = ", ".join(f"{estimate / real - 1:+.1%}" for estimate, real in zip(seconds, real_seconds, strict=True))
    bytes_text = f"{bytes_error:+.1%} of {peak / 2**20:,.0f} MiB"
    seconds_text = f"{seconds_error:+.1%} of {median(real_seconds):.4f} s (by turn {turns})"
    figures = (
        Figure(f"peak bytes: {name}", bytes_text, f"within {BYTES:.0%}", is_met=abs(bytes_error) <= BYTES),
        Figure(f"step seconds: {name}", seconds_text, f"within {SECONDS:.0%}", is_met=abs(seconds_error) <= SECONDS),
    )
    for figure in figures:
        print(figure)
        note_figure(figure)
    assert dict(estimated.states) == states
    assert all(figure.is_met for figure in figures)

"""Tests the seconds of recorded steps: their operators, exchanges, waits and updates, and the bytes of copies to the host."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from sley_core.comm.device import Device
from sley_core.plan.load import plan_from_dict
from sley_core.plan.plan import Plan
from sley_estimate.bytes import rank
from sley_estimate.bytes.rank import build_rank0_draft, run_stages
from sley_estimate.calibrate.bench import measure_layers
from sley_estimate.commands import seconds_lines
from sley_estimate.machine import MachineFile, machine_from_dict
from sley_estimate.step import estimate
from sley_estimate.step.estimate import PlanEstimate, estimate_plan, record_stages
from sley_estimate.step.record import HOST, BeginEvent
from sley_estimate.testing import short_calibration, small_machine
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import running
from train_cli.commands.plan import draw_timeline

FAST = {"latency_s": 1e-5, "bandwidth": 1e10}
SLOW = {"latency_s": 1e-5, "bandwidth": 1e6}


def make_machine(link: dict[str, float] = FAST, layers: Sequence[dict[str, Any]] = (), per_host: int = 8) -> MachineFile:
    rates = {"memory_bandwidth": 1e9, "matmul": {name: {"flops_per_s": 1e10} for name in ("fp64", "fp32")}}
    device = small_machine(device__kind="cpu")["device"] | rates
    links = {"ranks_per_host": per_host, "same_host": link, "other_host": SLOW}
    return machine_from_dict(small_machine(device=device, links=links, layers=[*layers]))


def plan_of(folder: Path, **changes: Any) -> Plan:
    return plan_from_dict(small_plan(**changes), folder)


def estimate_on(plan: Plan, size: int, *machines: MachineFile) -> list[PlanEstimate]:
    """Returns the estimates of a plan on machines of one device type, from one recorded step."""
    records = record_stages(estimate.plan_for_machine(plan, machines[0]), size, build_rank0_draft(plan, size))
    with patch.object(estimate, "record_stages", lambda *_, **__: records):
        return [estimate_plan(plan, size, machine) for machine in machines]


TIES = {"model__tie_embeddings": True, "gradient_handlers": [{"use": "pp.shared_modules"}]}
STAGES = {"parallel": {"pp": 2}, "pipeline": {"use": "pp.one_f_one_b"}, "batch": {"global_size": 4, "micro_size": 1}}


def test_waits_are_described_with_exchange_and_peer(texts: Path) -> None:
    plan, machine = plan_of(texts, **STAGES | TIES), make_machine(SLOW)
    estimate = estimate_plan(plan, 2, machine)
    _, first, last, sources, *_ = seconds_lines(estimate, machine)
    assert "ms waiting for gradients from stage 1" in first
    assert "ms waiting for sums of gradients" in first
    assert "ms waiting for activations from stage 0" in last
    assert f"all {len(estimate.layers)} layers were computed from their operators (even)" in sources
    drawn = "\n".join(draw_timeline(estimate.step.timeline, 100).splitlines()[:2])
    for stage, line in enumerate((first, last)):
        share = estimate.step.timeline.idle_share(stage)
        assert f"idle {share:.1%}" in line
        assert f"{share:4.0%} idle" in drawn, "the drawing omits work after the list"


SHARDS = {"parallel": {"wp": 2}, "weights": {"use": "isp.communicator"}}
SLICES = {"parallel": {"sp": 2}, "sequence": {"use": "isp.all_to_all"}}
RANKS = {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "powersgd.reducer", "start_step": 1}]}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("changes", "exchange"),
    [(SHARDS, "gather"), (SLICES, "swap"), ({"precision": {"compute": "fp32"}, **RANKS}, "sum")],
    ids=["wp", "sp", "powersgd"],
)
def test_slow_link_causes_waits(texts: Path, changes: dict[str, Any], exchange: str) -> None:
    plan = plan_of(texts, **changes)
    fast, slow = (result.step for result in estimate_on(plan, 2, make_machine(FAST), make_machine(SLOW)))
    assert slow.seconds > 1.2 * fast.seconds
    assert slow.exposed_s(0)[exchange] > fast.exposed_s(0).get(exchange, 0.0)


def test_layers_of_slices_are_scaled_from_full_sequences(texts: Path) -> None:
    """Exchanges and the update are not scaled."""
    plan = plan_of(texts, **SLICES)
    with short_calibration():
        tables = measure_layers(plan, Device(torch.device("cpu")))
    assert [table["name"] for table in tables] == ["embed", "blocks.0", "head"]
    times = ("forward", "backward", "input_gradient", "weight_gradient")
    scaled = [[{**table, **dict.fromkeys(times, seconds)} for table in tables] for seconds in (0.5, 1.0)]
    estimates = estimate_on(plan, 2, *(make_machine(layers=tables) for tables in scaled))
    assert [layer.source for layer in estimates[0].layers] == ["in proportion"] * 4
    assert estimates[1].step.timeline.computing_s[0] == pytest.approx(2 * estimates[0].step.timeline.computing_s[0], rel=1e-3)
    assert estimates[0].step.updating_s == pytest.approx(estimates[1].step.updating_s)
    swaps = [estimate.step.exposed_s(0)["swap"] for estimate in estimates]
    assert swaps[0] == pytest.approx(swaps[1])


LINK = {"latency_s": 1e-4, "bandwidth": 1e9}
MACHINE = small_machine(device__kind="cpu", links={"ranks_per_host": 2, "same_host": LINK})
FP32 = {"precision": {"compute": "fp32"}}


def seconds(plan: Plan, size: int, machine: dict[str, Any] = MACHINE) -> float:
    return estimate_plan(plan, size, machine_from_dict(machine)).step.seconds


@pytest.mark.sample(1)
@pytest.mark.parametrize(("dp", "reduced"), [(2, {"gradient_handlers": [{"use": "dp.bucketed"}]}), (1, {})])
def test_update_moves_all_parameters(texts: Path, dp: int, reduced: dict[str, Any]) -> None:
    """AdamW in fp32 reads gradients twice, and reads and writes weights and two states."""
    staged = {"parallel": {"pp": 2, "dp": dp}, "pipeline": {"use": "pp.one_f_one_b"}}
    plan = plan_of(texts, **FP32, **staged, optimizer={"use": "core.adamw", "lr": 1e-3}, **reduced)
    parameters = {p for layer in build_rank0_draft(plan, 2 * dp).model.layers for p in layer.module.parameters()}
    at_once = changed(MACHINE, links__ranks_per_host=4, device__launch_s=0.0)
    moved_bytes = 4 * (2 + 2 * 3) * sum(p.numel() for p in parameters)
    step = estimate_plan(plan, 2 * dp, machine_from_dict(at_once)).step
    assert sum(step.updating_s) == pytest.approx(moved_bytes / MACHINE["device"]["memory_bandwidth"], rel=0.05)


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", [{"use": "pp.interleaved", "chunks": 2}, {"use": "pp.zero_bubble_v"}])
def test_few_recorded_microbatches_stand_for_many(texts: Path, schedule: dict[str, Any]) -> None:
    layout = {"parallel": {"pp": 2, "wp": 2}, "weights": {"use": "isp.communicator"}, "pipeline": schedule}
    plan = plan_of(texts, **layout, batch={"global_size": 32, "micro_size": 1})
    one_host = changed(MACHINE, links__ranks_per_host=4)
    represented_s = seconds(plan, 4, one_host)
    with patch.object(rank, "min_equivalent_microbatches", lambda lists, num_microbatches: num_microbatches):
        assert represented_s == pytest.approx(seconds(plan, 4, one_host), rel=0.01)


@pytest.mark.sample(1)
@pytest.mark.parametrize("handler", ["dp.sharded", "dp.bucketed"])
@pytest.mark.parametrize("schedule", ["one_f_one_b", "zero_bubble_h1"])
def test_representative_stages_give_equal_seconds(texts: Path, schedule: str, handler: str) -> None:
    stages = {"parallel": {"pp": 4, "dp": 2}, "pipeline": {"use": f"pp.{schedule}"}, "partition": {"use": "pp.uniform"}}
    handlers = [{"use": handler, "bucket_mb": 0.02}]
    plan = plan_of(texts, **FP32, **stages, batch={"global_size": 8, "micro_size": 1}, gradient_handlers=handlers)
    slow = changed(MACHINE, links={"ranks_per_host": 8, "same_host": LINK | {"bandwidth": 1e7}})
    results: dict[int, Any] = {}

    def run_once(plan: Plan, size: int, stages: Sequence[int], *args: Any, **options: Any) -> list[Any]:
        """Runs each stage once for both estimates."""
        remaining = [stage for stage in stages if stage not in results]
        results.update(zip(remaining, run_stages(plan, size, remaining, *args, **options), strict=True))
        return [results[stage] for stage in stages]

    with patch.object(estimate, "run_stages", run_once):
        represented_s = seconds(plan, 8, slow)
        assert len(results) < 4, "some stages do equal work"
        with patch.object(estimate, "representative_stages", lambda plan, topology, draft: range(topology.pp)):
            assert represented_s == pytest.approx(seconds(plan, 8, slow), rel=1e-9)


# -- copies to the host ------------------------------------------------------------------------------------------------

COPIED = small_plan(batch__global_size=2, precision={"compute": "bf16"})
STATES = {"use": "memory.optimizer_states", "when": "between_steps", "bucket_mb": 0.002}
OPTIMIZER = {"use": "memory.host_optimizer", "bucket_mb": 0.002}
ACTIVATIONS = {"use": "memory.host", "min_bytes": 1}
COPIES: dict[str, Tables] = {
    "both": {"offload": [STATES], "activations": ACTIVATIONS},
    "between_steps": {"offload": [STATES]},
    "host_optimizer": {"offload": [OPTIMIZER]},
    "memory.host": {"activations": ACTIVATIONS},
}


def estimated_copies(folder: Path, changes: Tables, *, device: str) -> dict[str, int]:
    """Returns the bytes that a recorded step copies in each direction."""
    num_bytes = {"to_host": 0, "to_device": 0}
    plan = plan_from_dict(changed(COPIED, **changes, run__device=device), folder)
    _, records = record_stages(plan, 1, build_rank0_draft(plan, 1))
    step = records[0].step
    for event in [*step.opening, *(event for _, events in step.actions for event in events), *step.closing]:
        if isinstance(event, BeginEvent) and event.axis == HOST:
            num_bytes[event.kind] += event.num_bytes
    return num_bytes


@pytest.mark.sample(1)
@pytest.mark.parametrize("copies", COPIES)
def test_step_copies_estimated_bytes(copies: str, texts: Path) -> None:
    tables = changed(COPIED, **COPIES[copies])
    totals: list[tuple[float, float]] = []
    with running(tables, texts) as run:
        for _ in range(3):
            run.step()
            moved = [manager.moved(part) for manager in run.memory.managers for part in manager.parts]
            policy = run.counts.get("memory.host", {})
            out = sum(stats.copied_out for stats in moved) + policy.get("moved_bytes", 0)
            totals.append((out, sum(stats.copied_in for stats in moved) + policy.get("fetched_bytes", 0)))
    (previous_out, previous_in), (out, copied_in) = totals[-2:]
    assert out > previous_out
    assert copied_in > previous_in
    real = {"to_host": out - previous_out, "to_device": copied_in - previous_in}
    assert estimated_copies(texts, COPIES[copies], device="cpu") == real
    if "activations" not in tables:  # CUDA kernels save other activations
        assert estimated_copies(texts, COPIES[copies], device="cuda") == real

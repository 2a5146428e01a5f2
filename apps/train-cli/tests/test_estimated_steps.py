"""Seconds from steps without values: what each action does and waits for, exchanges, updates, and copies to the host, whose
bytes are those that a run copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from sley_core.actions.action import Action, Kind
from sley_core.actions.draw import draw_text
from sley_core.comm.device import Device
from sley_core.plan.load import plan_from_dict
from sley_core.plan.plan import Plan
from sley_estimate.bytes.rank import rank_bytes
from sley_estimate.bytes.stages import build_first_draft
from sley_estimate.calibrate.layers import measure_layers
from sley_estimate.commands.estimate import seconds_lines
from sley_estimate.layers.operators import Operator
from sley_estimate.machine import MachineFile, machine_from_dict
from sley_estimate.step import estimate
from sley_estimate.step.estimate import estimate_seconds, record_stages
from sley_estimate.step.record import HOST, BeginEvent, ComputeEvent, ExchangeReference, RecordedStep, WaitEvent, expand_step
from sley_estimate.testing import short_calibration, small_machine
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import record

FAST = {"latency_s": 1e-5, "bandwidth": 1e10}
SLOW = {"latency_s": 1e-5, "bandwidth": 1e6}


def machine(link: dict[str, float] = FAST, layers: Sequence[dict[str, Any]] = (), per_host: int = 8) -> MachineFile:
    rates = {"memory_bandwidth": 1e9, "matmul": {name: {"flops_per_s": 1e10} for name in ("fp64", "fp32")}}
    device = small_machine(device__kind="cpu")["device"] | rates
    links = {"ranks_per_host": per_host, "same_host": link, "other_host": SLOW}
    return machine_from_dict(small_machine(device=device, links=links, layers=[*layers]))


DATA = {"use": "data.text", "source": "python-stdlib", "sequence": 24}


def plan_of(**changes: Any) -> Plan:
    return plan_from_dict(small_plan(**{"data": DATA} | changes))


TIES = {"model__tie_embeddings": True, "gradient_handlers": [{"use": "pp.shared_modules"}]}
STAGES = {"parallel": {"pp": 2}, "pipeline": {"use": "pp.one_f_one_b"}, "batch": {"global_size": 4, "micro_size": 1}}


def test_waits_are_told_with_what_is_waited_for_and_from_whom() -> None:
    plan, on = plan_of(**STAGES | TIES), machine(SLOW)
    found = estimate_seconds(plan, 2, on)
    _, first, last, sources, *_ = seconds_lines(found, on)
    assert "ms waiting for gradients from stage 1" in first
    assert "ms waiting for sums of gradients" in first
    assert "ms waiting for activations from stage 0" in last
    assert f"all {len(found.layers)} layers were computed from their operators (even)" in sources
    drawn = "\n".join(draw_text(found.step.timeline, 100).splitlines()[:2])
    for stage, line in enumerate((first, last)):
        share = found.step.timeline.idle(stage)
        assert f"idle {share:.1%}" in line
        assert f"{share:4.0%} idle" in drawn, "the drawing left out what comes behind the list"


SHARDS = {"parallel": {"wp": 2}, "weights": {"use": "isp.communicator"}}
SLICES = {"parallel": {"sp": 2}, "sequence": {"use": "isp.all_to_all"}}
RANKS = {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "powersgd.reducer", "start_step": 1}]}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("changes", "lane"),
    [(SHARDS, "gather"), (SLICES, "swap"), ({"precision": {"compute": "fp32"}, **RANKS}, "sum")],
    ids=["wp", "sp", "powersgd"],
)
def test_a_slow_link_is_waited_for(changes: dict[str, Any], lane: str) -> None:
    plan = plan_of(**changes)
    fast, slow = (estimate_seconds(plan, 2, machine(link)).step for link in (FAST, SLOW))
    assert slow.seconds > 1.2 * fast.seconds
    assert slow.exposed_s(0)[lane] > fast.exposed_s(0).get(lane, 0.0)


def test_a_gather_ahead_is_begun_before_the_layer_in_front_of_it_computes() -> None:
    plan = plan_of(**SHARDS)
    step = record_stages(plan, 2, build_first_draft(plan, 2)).ranks[0].step
    words = next(words for action, words in step.actions if action.kind is Kind.FORWARD)
    gathers = [at for at, word in enumerate(words) if isinstance(word, BeginEvent) and word.kind == "gather"]
    waits = [at for at, word in enumerate(words) if isinstance(word, WaitEvent)]
    assert gathers[1] < waits[0] < waits[1], words
    assert any(isinstance(word, ComputeEvent) for word in words[gathers[1] : waits[1]])


F, B = Kind.FORWARD, Kind.BACKWARD


def work(number: int) -> ComputeEvent:
    return ComputeEvent((Operator("add", number),))


def test_a_longer_step_keeps_what_each_action_waits_for() -> None:
    """Each forward waits for the gather that the one before it began, and begins that of the next."""
    gather = BeginEvent("gather", "wp", "gather", 8)
    wait = WaitEvent(ExchangeReference(gather.queue, 1))
    actions = []
    for micro in range(3):
        words = (wait, work(1), gather)
        actions += [(Action(F, 0, micro), words), (Action(B, 0, micro), (work(2),))]
    step = RecordedStep((gather,), actions, (wait, work(3)))
    longer = [Action(kind, 0, micro) for micro in range(6) for kind in (F, B)]
    found = expand_step(step, longer)
    assert [action for action, _ in found.actions] == longer
    assert [word for word in found.events if not isinstance(word, ComputeEvent)] == [gather, wait] * 7
    assert sum(isinstance(word, ComputeEvent) for word in found.events) == 13


def test_layers_of_slices_are_in_proportion_to_what_was_timed_of_whole_sequences() -> None:
    """Only what was timed alone is scaled with them: what they swap, and the update, stay."""
    plan = plan_of(**SLICES)
    with short_calibration():
        tables = measure_layers(plan, Device(torch.device("cpu")))
    assert [table["name"] for table in tables] == ["embed", "blocks.0", "head"]
    times = ("forward", "backward", "input_gradient", "weight_gradient")
    scaled = [[{**table, **dict.fromkeys(times, seconds)} for table in tables] for seconds in (0.5, 1.0)]
    found = [estimate_seconds(plan, 2, machine(layers=some)) for some in scaled]
    assert [layer.source for layer in found[0].layers] == ["in proportion"] * 4
    assert found[1].step.computing_s[0] == pytest.approx(2 * found[0].step.computing_s[0], rel=1e-3)
    assert found[0].step.updating_s == pytest.approx(found[1].step.updating_s)
    swaps = [one.step.exposed_s(0)["swap"] for one in found]
    assert swaps[0] == pytest.approx(swaps[1])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("tables", "sizes", "lane"),
    [(SHARDS, {"dp": 6, "wp": 3}, "gather"), (SLICES, {"dp": 2, "sp": 3}, "swap"), (STAGES, {"dp": 3, "pp": 2}, "up")],
    ids=["wp", "sp", "pp"],
)
def test_the_slowest_group_of_a_stage_counts(tables: dict[str, Any], sizes: dict[str, int], lane: str) -> None:
    """Of six ranks on hosts of four the first three are on one host, the next three on two; so are ranks 1 and 4."""
    several = {"model__hidden": 24, "model__heads": 6, "model__kv_heads": 3, "batch": {"global_size": 12, "micro_size": 1}}
    plan = plan_of(**{**tables, **several, "parallel": sizes})
    together, apart = (machine(per_host=number) for number in (6, 4))
    last = sizes.get("pp", 1) - 1
    slow, fast = (estimate_seconds(plan, 6, one).step.exposed_s(last)[lane] for one in (apart, together))
    assert slow > 10 * fast


LINK = {"latency_s": 1e-4, "bandwidth": 1e9}
MACHINE = small_machine(device__kind="cpu", links={"ranks_per_host": 2, "same_host": LINK})


FP32 = {"precision": {"compute": "fp32"}}


def seconds(plan: Plan, size: int, machine: dict[str, Any] = MACHINE) -> float:
    return estimate_seconds(plan, size, machine_from_dict(machine)).step.seconds


@pytest.mark.sample(1)
@pytest.mark.parametrize(("dp", "reduced"), [(2, {"gradient_handlers": [{"use": "dp.bucketed"}]}), (1, {})])
def test_all_that_stages_have_is_updated_whether_or_not_it_is_reduced(dp: int, reduced: dict[str, Any]) -> None:
    """By AdamW in fp32: the gradient is read twice, weight and two states are read and written."""
    staged = {"parallel": {"pp": 2, "dp": dp}, "pipeline": {"use": "pp.one_f_one_b"}}
    plan = plan_of(**FP32, **staged, optimizer={"use": "core.adamw", "lr": 1e-3}, **reduced)
    parameters = {p for layer in build_first_draft(plan, 2 * dp).model.layers for p in layer.module.parameters()}
    at_once = changed(MACHINE, links__ranks_per_host=4, device__launch_s=0.0)
    moved_bytes = 4 * (2 + 2 * 3) * sum(p.numel() for p in parameters)
    found = estimate_seconds(plan, 2 * dp, machine_from_dict(at_once)).step
    assert sum(found.updating_s) == pytest.approx(moved_bytes / MACHINE["device"]["memory_bandwidth"], rel=0.05)


@pytest.mark.sample(1)
@pytest.mark.parametrize("handler", ["dp.sharded", "dp.bucketed"])
@pytest.mark.parametrize("schedule", ["one_f_one_b", "zero_bubble_h1"])
def test_alike_stages_take_what_each_would_by_its_own_steps(schedule: str, handler: str) -> None:
    plan = plan_of(
        **FP32,
        batch={"global_size": 8, "micro_size": 1},
        parallel={"pp": 4, "dp": 2},
        pipeline={"use": f"pp.{schedule}"},
        partition={"use": "pp.uniform"},
        gradient_handlers=[{"use": handler, "bucket_mb": 0.02}],
    )
    slow = changed(MACHINE, links={"ranks_per_host": 8, "same_host": LINK | {"bandwidth": 1e7}})
    with patch.object(estimate, "take_steps", wraps=estimate.take_steps) as looked:
        together = seconds(plan, 8, slow)
    assert len(looked.call_args.args[2]) < 4, "some stages are alike"
    with patch.object(estimate, "representative_stages", lambda plan, topology, draft: [(one,) for one in range(topology.pp)]):
        assert together == pytest.approx(seconds(plan, 8, slow), rel=1e-9)


# -- copies to the host ------------------------------------------------------------------------------------------------

COPIED = small_plan(batch__global_size=2, precision={"compute": "bf16"})
STATES = {"use": "memory.optimizer_states", "when": "between_steps", "bucket_mb": 0.002}
OPTIMIZER = {"use": "memory.host_optimizer", "bucket_mb": 0.002}
ACTIVATIONS = {"use": "memory.host", "min_bytes": 1}
COPIES: dict[str, Tables] = {
    "between_steps": {"offload": [STATES]},
    "host_optimizer": {"offload": [OPTIMIZER]},
    "memory.host": {"activations": ACTIVATIONS},
    "both": {"offload": [STATES], "activations": ACTIVATIONS},
}


def foretold(folder: Path, changes: Tables, *, kind: str) -> dict[str, int]:
    """Bytes that a recorded step copies, each way."""
    found = {"to_host": 0, "to_device": 0}
    plan = plan_from_dict(changed(COPIED, **changes, run__device=kind), folder)
    (recorded,) = record_stages(plan, 1, build_first_draft(plan, 1)).ranks
    for word in recorded.step.events:
        if isinstance(word, BeginEvent) and word.axis == HOST:
            found[word.kind] += word.num_bytes
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("copies", COPIES)
def test_a_step_copies_as_many_bytes_as_were_foretold(copies: str, texts: Path) -> None:
    tables = changed(COPIED, **COPIES[copies])
    after: list[tuple[float, float]] = []

    def watch(run: Any) -> None:
        def count(_row: object) -> None:
            moved = [each.moved(part) for each in run.memory.managers for part in each.parts]
            policy = run.counts.get("memory.host", {})
            out = sum(one.copied_out for one in moved) + policy.get("moved_bytes", 0)
            after.append((out, sum(one.copied_in for one in moved) + policy.get("fetched_bytes", 0)))

        run.listeners.append(count)

    record(tables, 4, folder=texts, prepare=watch)
    (out, into), (more_out, more_into) = after[-2:]
    assert more_out > out
    assert more_into > into
    told = {"to_host": more_out - out, "to_device": more_into - into}
    assert foretold(texts, COPIES[copies], kind="cpu") == told
    if "activations" not in tables:  # of these a GPU's kernels save something else
        assert foretold(texts, COPIES[copies], kind="cuda") == told


def test_masters_on_the_host_are_none_of_the_devices_memory(texts: Path) -> None:
    here, away = (
        rank_bytes(plan_from_dict(changed(COPIED, run__device="cuda", **changes), texts), 0, 1)
        for changes in ({}, {"offload": [OPTIMIZER]})
    )
    moved = here.states["masters"] + here.states["optimizer_states"]
    assert moved > 0
    assert away.states["masters"] == away.states["optimizer_states"] == 0
    assert here.peak - away.peak == pytest.approx(moved, rel=0.1)

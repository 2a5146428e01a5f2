"""Seconds from steps that are taken without values: what each action does, and what it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from sley_core.actions.action import Action, Kind
from sley_core.actions.draw import draw_text
from sley_core.comm.device import Device
from sley_core.plan.load import plan_from_dict
from sley_estimate.bytes.stages import stage_bytes
from sley_estimate.calibrate.layers import measure_layers
from sley_estimate.commands.seconds import seconds_lines
from sley_estimate.layers.operators import Operator
from sley_estimate.machine.read import machine_from_dict
from sley_estimate.recorded.expand import expanded
from sley_estimate.recorded.record import record
from sley_estimate.recorded.words import Awaited, Began, RecordedStep, Worked
from sley_estimate.seconds_of_plan import estimate_both, estimate_seconds
from sley_estimate.testing.short_calibration import shortly
from sley_testing.plans import small_plan

FAST = {"latency_s": 1e-5, "bandwidth": 1e10}
SLOW = {"latency_s": 1e-5, "bandwidth": 1e6}


def machine(
    link: dict[str, float] = FAST,
    layers: Sequence[dict[str, Any]] = (),
    launch_s: float = 1e-6,
    kind: str = "cpu",
    per_host: int = 8,
):
    matmul = {"fp64": {"flops_per_s": 1e10}, "fp32": {"flops_per_s": 1e10}}
    device = {"name": "even", "kind": kind, "memory_bandwidth": 1e9, "launch_s": launch_s, "matmul": matmul}
    links = {"ranks_per_host": per_host, "same_host": link, "other_host": SLOW}
    return machine_from_dict({"format": 1, "device": device, "links": links, "layers": [*layers]})


def plan_of(**changes: Any):
    data = {"use": "data.text", "source": "python-stdlib", "sequence": 24}
    return plan_from_dict(small_plan(data=data, **changes))


TIES = {"model__tie_embeddings": True, "gradient_handlers": [{"use": "pp.shared_modules"}]}
STAGES = {"parallel": {"pp": 2}, "pipeline": {"use": "pp.one_f_one_b"}, "batch": {"global_size": 12, "micro_size": 1}}


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
        share = found.step.idle(stage)
        assert f"idle {share:.1%}" in line
        assert f"{share:4.0%} idle" in drawn, "the drawing left out what comes behind the list"


def test_attention_that_a_policy_keeps_is_not_priced_twice() -> None:
    """`memory.selective` runs a layer again but for its attention."""
    long: dict[str, Any] = {"data": {"use": "data.text", "source": "python-stdlib", "sequence": 512}}
    long |= {"model__hidden": 64, "model__ffn_hidden": 96}
    whole, kept = (plan_from_dict(small_plan(**long, activations={"use": use})) for use in RECOMPUTING)
    seconds = [estimate_seconds(plan, 1, machine()).step.seconds for plan in (whole, kept)]
    assert seconds[1] < 0.97 * seconds[0]


def test_sharded_layers_that_run_again_are_recorded() -> None:
    plan = plan_of(**SHARDS, activations={"use": "core.recompute"})
    again, once = (estimate_seconds(one, 2, machine()).step.seconds for one in (plan, plan_of(**SHARDS)))
    assert again > once


RECOMPUTING = "core.recompute", "memory.selective"
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


def test_on_cuda_the_same_steps_tell_bytes_and_seconds() -> None:
    """As much as steps that are taken for either alone."""
    plan, even = plan_of(**SHARDS, run__device="cuda", precision={"compute": "fp32"}), machine(kind="cuda")
    held, seconds = estimate_both(plan, 2, even)
    assert list(held) == list(stage_bytes(plan, 2))
    assert seconds.step == estimate_seconds(plan, 2, even).step
    assert seconds.step.exposed_s(0)["gather"] > 0


def test_a_gather_ahead_is_begun_before_the_layer_in_front_of_it_computes() -> None:
    step = record(plan_of(**SHARDS), 0, 2).step
    words = next(words for action, words in step.actions if action.kind is Kind.FORWARD)
    gathers = [at for at, word in enumerate(words) if isinstance(word, Began) and word.kind == "gather"]
    waits = [at for at, word in enumerate(words) if isinstance(word, Awaited)]
    assert gathers[1] < waits[0] < waits[1], words
    assert any(isinstance(word, Worked) for word in words[gathers[1] : waits[1]])


F, B = Kind.FORWARD, Kind.BACKWARD


def work(number: int) -> Worked:
    return Worked((Operator("add", number),))


def test_a_longer_step_keeps_what_each_action_waits_for() -> None:
    """Each forward waits for the gather that the one before it began, and begins that of the next."""
    actions = []
    for micro in range(3):
        words = (Awaited(micro), work(1), Began(micro + 1, "gather", "wp", "gather", 8))
        actions += [(Action(F, 0, micro), words), (Action(B, 0, micro), (work(2),))]
    step = RecordedStep((Began(0, "gather", "wp", "gather", 8),), actions, (Awaited(3), work(3)))
    longer = [Action(kind, 0, micro) for micro in range(6) for kind in (F, B)]
    found = expanded(step, longer)
    assert [action for action, _ in found.actions] == longer
    begun = [word.number for word in found.words if isinstance(word, Began)]
    assert len(begun) == len(set(begun)) == 7
    assert [word.number for word in found.words if isinstance(word, Awaited)] == begun
    assert sum(isinstance(word, Worked) for word in found.words) == 13


def test_layers_of_slices_take_what_was_timed_of_them() -> None:
    """Only what was timed alone is scaled with them: what they swap, and the update, stay."""
    plan = plan_of(**SLICES)
    with shortly():
        tables = measure_layers(plan, Device(torch.device("cpu")))
    assert [table["name"] for table in tables] == ["embed", "blocks.0", "head"]
    times = ("forward", "backward", "input_gradient", "weight_gradient")
    slower = [{**table, **dict.fromkeys(times, 1.0)} for table in tables]
    found = [estimate_seconds(plan, 2, machine(layers=some)) for some in (tables, slower)]
    assert [layer.is_measured for layer in found[0].layers] == [True] * 4
    num_micros = plan.num_micros(plan.topology(2))
    assert found[1].step.computing_s[0] == pytest.approx(num_micros * 4 * 2.0, rel=1e-3)
    assert found[0].step.updating_s == pytest.approx(found[1].step.updating_s)
    swaps = [one.step.exposed_s(0)["swap"] for one in found]
    assert swaps[0] == pytest.approx(swaps[1])


def test_layers_of_slices_are_other_layers_than_those_of_short_sequences() -> None:
    """They look along as many positions as all slices have."""
    positions = {"sequence": {"use": "isp.all_to_all", "positions": False}}
    slices = plan_of(**{**SLICES, **positions})
    short = plan_from_dict(small_plan(data={"use": "data.text", "source": "python-stdlib", "sequence": 12}))
    with shortly():
        tables = [measure_layers(plan, Device(torch.device("cpu"))) for plan in (slices, short)]
    keys = [{table["key"] for table in some} for some in tables]
    assert not keys[0] & keys[1]


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

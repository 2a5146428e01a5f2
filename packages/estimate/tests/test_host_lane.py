"""Where the host runs ahead of the device, a step takes the longer of what the device takes and what the host takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from sley_core.actions.action import Action, Kind, loop
from sley_core.actions.lower import lower
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_core.plan.plan import Plan
from sley_estimate.bytes.each_rank import first_draft
from sley_estimate.calibrate import engine
from sley_estimate.calibrate.engine import MICROS, WEIGHTS, measure_engine, solved
from sley_estimate.layers.operators import LayerWork, Operator
from sley_estimate.machine.read import machine_from_dict
from sley_estimate.machine.tables import EngineTable, MachineFile
from sley_estimate.search.compare import parts_of_seconds
from sley_estimate.seconds.layer_seconds import LayerSeconds
from sley_estimate.seconds.links import NOTHING
from sley_estimate.seconds.program import Compute, Word
from sley_estimate.seconds.result import StepSeconds
from sley_estimate.seconds_of_plan import estimate_seconds
from sley_estimate.testing.machines import small_machine, timed_layers
from sley_estimate.testing.plain_steps import plain_step
from sley_testing.plans import small_plan

ENGINE = {"step_s": 1e-6, "parameter_s": 1e-8, "micro_s": 1e-7, "gradient_s": 1e-8}

NARROW = LayerSeconds(1.0, 2.0, 1.0, 1.0, host_forward=2.0, host_backward=3.0)
WIDE = LayerSeconds(4.0, 8.0, 4.0, 4.0, host_forward=2.0, host_backward=3.0)


def stepped(layers: Sequence[LayerSeconds], micros: int = 1, behind: Sequence[Word] = ()) -> StepSeconds:
    """A step of one stage: all forwards and backwards of a micro-batch, one after the other."""
    actions = [Action(kind, 0, micro) for micro in range(micros) for kind in (Kind.FORWARD, Kind.BACKWARD)]
    return plain_step(lower([actions], loop(1), micros), loop(1), [layers], [], {0: behind})


@pytest.mark.parametrize(
    ("layers", "device_s", "host_s"), [([NARROW] * 2, 6, 10), ([WIDE] * 2, 24, 10), ([NARROW, WIDE], 15, 10)]
)
def test_what_the_host_loses_in_narrow_layers_it_catches_up_in_wide_ones(
    layers: list[LayerSeconds], device_s: float, host_s: float
) -> None:
    found = stepped(layers, micros=3)
    assert found.devices_s == pytest.approx(3 * device_s)
    assert found.host_s == (pytest.approx(3 * host_s),)
    assert found.seconds == pytest.approx(3 * max(device_s, host_s))
    assert found.idle(0) == pytest.approx(1 - 3 * device_s / found.seconds)


def test_what_the_host_takes_beside_layers_comes_on_top() -> None:
    found = stepped([NARROW], behind=[Compute(1.0, None, 0.5)])
    assert (found.devices_s, found.host_s) == (pytest.approx(4.0), (pytest.approx(5.5),))


def test_the_slowest_host_of_all_stages_counts() -> None:
    actions = [[Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)] for _ in range(2)]
    behind = {1: [Compute(0.0, None, 20.0)]}
    found = plain_step(lower(actions, loop(2), 1), loop(2), [[WIDE], [NARROW]], [NOTHING], behind)
    assert found.devices_s == pytest.approx(15.0)
    assert found.host_s == (pytest.approx(5.0), pytest.approx(25.0))
    assert found.seconds == pytest.approx(25.0)


def test_parts_of_a_step_that_waits_for_its_host_sum_to_it() -> None:
    bound, free = stepped([NARROW]), stepped([WIDE])
    parts = parts_of_seconds(bound)
    assert parts["waiting for the host"] == pytest.approx(2.0)
    assert "waiting for the host" not in parts_of_seconds(free)
    assert sum(parts.values()) == pytest.approx(bound.seconds)


def plan_of(**changes: Any) -> Plan:
    data = {"use": "data.text", "source": "python-stdlib", "sequence": 24}
    return plan_from_dict(small_plan(**{"data": data, "precision": {"compute": "fp32"}, **changes}))


def machine_of(plan: Plan, host: float) -> MachineFile:
    """A machine on which each layer of `plan` takes what is counted, and its host `host` times as long to start it."""
    layers = timed_layers(plan, host=host, launch_s=0.0)
    return machine_from_dict(small_machine(device__launch_s=0.0, layers=layers, engine=ENGINE))


@pytest.mark.sample(1)
@pytest.mark.parametrize("host", [0.01, 3.0])
def test_a_step_has_the_host_of_its_layers_and_of_its_engine(host: float) -> None:
    plan = plan_of()
    machine, num_micros = machine_of(plan, host), plan.num_micros(plan.topology(1))
    found = estimate_seconds(plan, 1, machine)
    num_parameters = len({id(one) for layer in first_draft(plan, 1).model.layers for one in layer.module.parameters()})
    engine_s = EngineTable(**ENGINE).seconds(num_parameters, num_micros)
    layers_s = sum(one.seconds.forward + one.seconds.backward for one in found.layers) * num_micros
    # in what was recorded, the first micro-batch has fewer operators than those after it
    assert found.step.host_s == (pytest.approx(host * layers_s + engine_s, rel=0.02),)
    assert (found.step.seconds > found.step.devices_s) == (host > 1)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("changes", "is_waited_for"),
    [
        ({"optimizer": {"factory": "torch.optim:RMSprop", "lr": 1e-3}}, True),
        ({"precision": {"compute": "fp16"}}, True),
        ({"optimizer": {"use": "core.sgd", "lr": 1e-3}}, False),
    ],
)
def test_an_update_for_which_the_host_waits_is_waited_for(changes: dict[str, Any], is_waited_for: bool) -> None:
    """Where it does not know on the device whether a step is taken, it starts the update when the device has nothing to do."""
    plan, matmul = plan_of(**changes), {name: {"flops_per_s": 1e11} for name in ("fp16", "fp32")}
    slow, fast = (
        machine_from_dict(small_machine(engine=ENGINE | {"parameter_s": value}, device__matmul=matmul)) for value in (1e-3, 0.0)
    )
    one, other = (estimate_seconds(plan, 1, machine).step.devices_s for machine in (slow, fast))
    num_parameters = len({id(one) for layer in first_draft(plan, 1).model.layers for one in layer.module.parameters()})
    assert one - other == pytest.approx(num_parameters * 1e-3 if is_waited_for else 0.0, abs=1e-9)


@pytest.mark.sample(1)
@pytest.mark.parametrize("launch_s", [1e-3, 1e-9])
def test_what_the_engine_takes_comes_on_top_of_counted_layers(launch_s: float) -> None:
    """Those of a machine file without layers; the slower of device and launches counts in each phase besides."""
    plan, slow = plan_of(), {name: 100 * value for name, value in ENGINE.items()}
    bare, known = (small_machine(device__launch_s=launch_s, **more) for more in ({}, {"engine": slow}))
    without, machine = estimate_seconds(plan, 1, machine_from_dict(bare)).step, machine_from_dict(known)
    found = estimate_seconds(plan, 1, machine).step
    assert without.host_s == (0.0,)
    assert found.devices_s == pytest.approx(without.devices_s, rel=0.05)
    if launch_s > 1e-6:
        assert found.seconds == found.host_s[0] >= found.devices_s


def test_a_layer_in_proportion_has_its_host_by_the_number_of_operators() -> None:
    """Not by their size: a host starts large operators as fast as small ones."""
    device = machine_from_dict(small_machine(device__launch_s=0.1)).device
    small, large = (Operator("x", size) for size in (10**9, 10**12))
    there = LayerWork((small,), (), (small,) * 2, (small,), (small,), 0, 0, 0)
    again = LayerWork((large,), (large,), (large,) * 2, (large,), (large,), 0, 0, 0)
    measured = LayerSeconds(1.0, 2.0, 1.0, 1.0, 0.5, 1.0, 0.5, 0.5)
    found = LayerSeconds.in_proportion(again, there, measured, device)
    assert found.forward == pytest.approx(1000.0), "what starts take has no part in the device's seconds"
    assert (found.host_forward, found.host_backward) == pytest.approx((0.5, 1.5))
    assert (found.host_input_gradient, found.host_weight_gradient) == pytest.approx((1.0, 0.5))


def test_four_kinds_of_steps_tell_the_four_figures_of_the_engine() -> None:
    known = EngineTable(**ENGINE)
    seconds = {
        (count, micros): known.step_s + known.parameter_s * count + micros * (known.micro_s + known.gradient_s * count)
        for count in WEIGHTS
        for micros in MICROS
    }
    assert solved(seconds).model_dump() == pytest.approx(ENGINE)
    assert EngineTable(**ENGINE).seconds(WEIGHTS[0], MICROS[1]) == pytest.approx(seconds[WEIGHTS[0], MICROS[1]])
    flat = solved(dict.fromkeys(seconds, 1.0))
    assert flat.model_dump() == pytest.approx({"step_s": 1.0, "parameter_s": 0.0, "micro_s": 0.0, "gradient_s": 0.0})


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_the_engine_is_timed_by_runs_of_it(compute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the figures say what the engine takes there; no machine file of one has them."""
    monkeypatch.setattr(engine, "TURNS", 2)
    plan = plan_from_dict(small_plan(precision={"compute": compute}))
    with World.alone("cpu") as world:
        found = measure_engine(world.device, plan)
    assert found.keys() == ENGINE.keys()
    assert all(0.0 <= value < 1.0 and math.isfinite(value) for value in found.values())
    many, few = (EngineTable(**found).seconds(count, 1) for count in (1000, 10))
    assert many > 2 * few > 0, "each weight takes its time"

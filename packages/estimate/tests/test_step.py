"""Simulated steps against hand-computed ones: lanes, links, hosts, and copies."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
import torch

from sley_core.actions.action import Action, Kind, loop
from sley_core.actions.lower import lower
from sley_core.actions.simulate import Costs, simulate
from sley_core.comm.device import Device
from sley_core.comm.world import World
from sley_core.errors import PlanError
from sley_core.plan.load import plan_from_dict
from sley_core.plan.plan import Plan
from sley_core.topology import Topology
from sley_estimate.bytes.fake_tensors import FakeTensors
from sley_estimate.bytes.fake_world import FakeDevice
from sley_estimate.bytes.ledger import Ledger
from sley_estimate.bytes.rank import build_first_draft
from sley_estimate.calibrate import engine
from sley_estimate.calibrate.device import measure_host
from sley_estimate.calibrate.engine import MICRO_BATCH_COUNTS, WEIGHT_COUNTS, measure_engine, solve_engine_table
from sley_estimate.layers.operators import Operator
from sley_estimate.layers.prices import LayerSeconds
from sley_estimate.machine import EngineTable, LinksTable, MachineFile, machine_from_dict
from sley_estimate.step.estimate import estimate_plan
from sley_estimate.step.links import (
    NOTHING,
    Cost,
    collective_cost,
    concurrent_groups,
    copy_cost,
    host_operators_s,
    message_cost,
    slowest_cost,
    slowest_message_cost,
)
from sley_estimate.step.simulate import Await, Begin, Compute, Exchange, Instruction, ProgramSimulator, StepTime
from sley_estimate.testing import simulate_without_plan, small_machine, timed_layers
from sley_testing.plans import small_plan
from sley_testing.runs import random_action_lists


@pytest.mark.parametrize("seed", range(6))
def test_a_step_without_shared_links_equals_the_simulation_of_actions(seed):
    """The lists are random. Each pair of stages has one message at a time in one direction, as in `simulate`."""
    rng = random.Random(seed)
    placement, micros = loop(rng.randint(2, 4), rng.randint(1, 2)), rng.randint(1, 6)
    lowered = lower(random_action_lists(placement, micros, rng), placement, micros)
    even = Costs.even(placement.num_positions, forward=1.0, input_gradient=1.25, weight_gradient=0.5)
    layers = [[LayerSeconds(1.0, 1.75, 1.25, 0.5)]] * placement.num_positions
    step = simulate_without_plan(lowered, placement, layers, [NOTHING] * (placement.num_positions - 1))
    assert step.timeline.spans == simulate(lowered, placement, even).timeline.spans


def test_a_message_delays_the_stage_that_needs_it():
    actions = [Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)]
    lists = lower([actions, actions], loop(2), 1)
    step = simulate_without_plan(lists, loop(2), [[LayerSeconds(1.0, 2.0)]] * 2, [Cost(0.25, 0.5)])
    assert step.seconds == pytest.approx(6 + 2 * 0.75)
    assert step.exposed_s(0) == {"down": pytest.approx(0.75 + 3.0 + 0.75)}


def exchange(key, rank, links):
    return Exchange(key, f"lane {key}", (rank,), 0.0, 2.0, links=links)


def run(*programs):
    lanes = ProgramSimulator(programs)
    lanes.run()
    return lanes.ends_s


def test_two_groups_on_one_link_have_half_of_it_each():
    one, other = exchange("a", 0, ("card",)), exchange("b", 1, ("card",))
    assert run([Begin(one), Await("a")], [Begin(other), Await("b")]) == [4.0, 4.0]
    elsewhere = exchange("b", 1, ("another card",))
    assert run([Begin(one), Await("a")], [Begin(elsewhere), Await("b")]) == [2.0, 2.0]


def test_an_exchange_waits_for_its_lane_and_for_all_members():
    both = Exchange("x", "lane", (0, 1), 0.0, 1.0)
    first = Exchange("y", "lane", (0,), 0.0, 5.0)
    same = both._replace(work_s=1.01)  # with a number of its own among the totals
    assert run([Begin(first), Begin(both), Await("x")], [Compute(2.0), Begin(same), Await("x")]) == [6.0, 6.0]


@pytest.mark.parametrize(("computing", "end"), [(0.0, 3.0), (1.0, 3.0), (5.0, 6.0)], ids=["at once", "early", "late"])
def test_what_does_not_overlap_is_work_of_each_member_that_waits(computing, end):
    """Two seconds of three run beside computing; who does not wait does not work for it."""
    shared = Exchange("x", "lane", (0, 1), *Cost(0.0, 3.0).split_overlap(2 / 3))
    lanes = ProgramSimulator([[Begin(shared), Compute(computing), Await("x")], [Begin(shared)]])
    lanes.run()
    assert lanes.ends_s == pytest.approx([end, 0.0])
    (waits,) = lanes.exposed
    assert waits.end_s - waits.start_s == pytest.approx(end - computing)


def test_a_program_that_waits_for_nobody_is_refused_by_name():
    lone = Exchange("x", "lane", (0, 1), 0.0, 1.0)
    with pytest.raises(PlanError, match="program 0 waits for x"):
        run([Begin(lone), Await("x")], [Compute(1.0)])


CPU = torch.device("cpu")
ENGINE = {"step_s": 1e-6, "parameter_s": 1e-8, "micro_s": 1e-7, "gradient_s": 1e-8}
NARROW = LayerSeconds(1.0, 2.0, 1.0, 1.0, host_forward=2.0, host_backward=3.0)
WIDE = LayerSeconds(4.0, 8.0, 4.0, 4.0, host_forward=2.0, host_backward=3.0)


def stepped(layers: Sequence[LayerSeconds], micros: int = 1, behind: Sequence[Instruction] = ()) -> StepTime:
    """A step of one stage: all forwards and backwards of a microbatch, one after the other."""
    actions = [Action(kind, 0, micro) for micro in range(micros) for kind in (Kind.FORWARD, Kind.BACKWARD)]
    return simulate_without_plan(lower([actions], loop(1), micros), loop(1), [layers], [], {0: behind})


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
    assert found.timeline.idle_share(0) == pytest.approx(1 - 3 * device_s / found.seconds)


def plan_of(**changes: Any) -> Plan:
    data = {"use": "data.text", "source": "python-stdlib", "sequence": 24}
    return plan_from_dict(small_plan(**{"data": data, "precision": {"compute": "fp32"}, **changes}))


def load_machine_with_ranks(plan: Plan, host: float) -> MachineFile:
    """A machine on which each layer of `plan` takes what is counted, and its host `host` times as long to start it."""
    layers = timed_layers(plan, host=host, launch_s=0.0)
    return machine_from_dict(small_machine(device__launch_s=0.0, layers=layers, engine=ENGINE))


@pytest.mark.sample(1)
@pytest.mark.parametrize("host", [0.01, 3.0])
def test_a_step_has_the_host_of_its_layers_and_of_its_engine(host: float) -> None:
    plan = plan_of()
    machine, num_micros = load_machine_with_ranks(plan, host), plan.num_micros(plan.topology(1))
    found = estimate_plan(plan, 1, machine)
    num_parameters = len({id(one) for layer in build_first_draft(plan, 1).model.layers for one in layer.module.parameters()})
    engine_s = EngineTable(**ENGINE).seconds(num_parameters, num_micros)
    layers_s = sum(one.seconds.forward + one.seconds.backward for one in found.layers) * num_micros
    # in what was recorded, the first microbatch has fewer operators than those after it
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
    one, other = (estimate_plan(plan, 1, machine).step.devices_s for machine in (slow, fast))
    num_parameters = len({id(one) for layer in build_first_draft(plan, 1).model.layers for one in layer.module.parameters()})
    assert one - other == pytest.approx(num_parameters * 1e-3 if is_waited_for else 0.0, abs=1e-9)


def test_four_kinds_of_steps_tell_the_four_figures_of_the_engine() -> None:
    known = EngineTable(**ENGINE)
    seconds = {
        (count, micros): known.step_s + known.parameter_s * count + micros * (known.micro_s + known.gradient_s * count)
        for count in WEIGHT_COUNTS
        for micros in MICRO_BATCH_COUNTS
    }
    assert solve_engine_table(seconds).model_dump() == pytest.approx(ENGINE)
    assert all(known.seconds(*counts) == pytest.approx(seconds[counts]) for counts in seconds)
    flat = solve_engine_table(dict.fromkeys(seconds, 1.0))
    assert flat.model_dump() == pytest.approx({"step_s": 1.0, "parameter_s": 0.0, "micro_s": 0.0, "gradient_s": 0.0})


def test_the_engine_is_timed_by_its_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures are those of a CPU, whose machine files do not have them."""
    monkeypatch.setattr(engine, "NUM_TURNS", 2)
    with World.alone("cpu") as world:
        table = measure_engine(world.device, plan_from_dict(small_plan(precision={"compute": "bf16"})))
    assert table.keys() == ENGINE.keys()
    assert all(0.0 <= value < 1.0 and math.isfinite(value) for value in table.values())
    many, few = (EngineTable(**table).seconds(count, 1) for count in (1000, 10))
    assert many > 2 * few > 0, "each weight takes its time"


class CopyRecording:
    """Records the copies and the waits of a fake device."""

    def __init__(self):
        self.events = []
        self.numbers = count()

    def on_copy(self, direction, stream, num_bytes, previous):
        self.events.append((direction, stream, num_bytes, previous))
        return next(self.numbers)

    def on_wait(self, number):
        self.events.append(("awaited", number))


def test_a_copy_that_runs_ahead_is_awaited_with_all_before_it_on_its_stream() -> None:
    tensors, recording = FakeTensors(Ledger()), CopyRecording()
    with tensors.patch_torch(), tensors:
        device = FakeDevice(CPU, tensors=tensors, recording=recording, runs_ahead=True)
        copy_in_turns(device, torch.empty(4).view(torch.uint8), device.host_memory(16).data)
    assert recording.events == [
        ("to_host", 0, 16, None),
        ("to_host", 0, 16, None),
        ("to_host", 0, 16, None),
        ("to_device", 1, 16, 2),
        *(("awaited", number) for number in range(4)),
    ]


def copy_in_turns(device: FakeDevice, target: torch.Tensor, host: torch.Tensor) -> None:
    out, into = device.copy_stream(), device.copy_stream()
    out.copy(host, target)
    first = out.record()
    out.copy(host, target)
    out.copy(host, target)
    into.wait_for(out.record())
    into.copy(target, host)
    assert not first.is_done()
    out.record().hold_device()
    assert first.is_done()
    first.wait()
    assert not into.record().is_done()
    into.record().wait()


def test_an_exchange_waits_for_the_one_that_it_comes_after() -> None:
    """On another lane, begun at once; and where that has ended before."""
    out = Exchange("out", "to_host", (0,), 0.0, 2.0)
    into = Exchange("in", "to_device", (0,), 0.0, 3.0, after="out")
    lanes = ProgramSimulator([[Begin(out), Begin(into), Await("in"), Compute(1.0)]])
    lanes.run()
    assert lanes.ends_s == [6.0]
    late = ProgramSimulator([[Begin(out), Await("out"), Begin(into), Await("in")]])
    late.run()
    assert late.ends_s == [5.0]


def test_a_copy_takes_its_latency_and_its_bytes_at_the_rate_of_its_direction() -> None:
    table = {"to_host": 1e9, "to_device": 2e9, "latency_s": 1e-5, "memory_bandwidth": 4e9}
    machine = machine_from_dict(small_machine(host=table))
    assert copy_cost("to_host", 10**6, machine) == (1e-5, 1e-3, 0.0)
    assert copy_cost("to_device", 10**6, machine) == (1e-5, 5e-4, 0.0)
    assert host_operators_s([Operator("adamw", 10**6), Operator("copy", 10**6)], machine) == 5e-4


def test_a_cpu_without_a_table_copies_at_its_bandwidth_and_a_gpu_is_refused() -> None:
    cpu = machine_from_dict(small_machine(device__kind="cpu"))
    assert copy_cost("to_host", 10**6, cpu) == (cpu.device.launch_s, 2e6 / cpu.device.memory_bandwidth, 0.0)
    with pytest.raises(PlanError, match="machine-host"):
        copy_cost("to_host", 1, machine_from_dict(small_machine()))
    with pytest.raises(PlanError, match="machine-host"):
        host_operators_s([Operator("adamw", 1)], machine_from_dict(small_machine(host={"to_host": 1e9, "to_device": 1e9})))


def test_copies_are_measured_on_this_machine_and_make_a_table() -> None:
    table = measure_host(Device(CPU))
    assert set(table) == {"to_host", "to_device", "latency_s"}
    assert machine_from_dict(small_machine(device__kind="cpu", host=table)).host is not None
    assert 1e8 < table["to_device"] < 1e12


# -- costs of exchanges ------------------------------------------------------------------------------------------------


MB = 1_000_000


def links(per_host=4, shared=False, **same) -> LinksTable:
    return LinksTable.model_validate(
        {
            "ranks_per_host": per_host,
            "same_host": {"latency_s": 1e-5, "bandwidth": 1e9, **same},
            "other_host": {"latency_s": 1e-4, "bandwidth": 1e8, "shared": shared},
        }
    )


def test_a_ring_of_one_host() -> None:
    assert collective_cost("sum", 4 * MB, range(4), links()) == pytest.approx((6e-5, 2 * 3 / 4 * 4e-3, 0.0))
    assert collective_cost("gather", 4 * MB, range(4), links()) == pytest.approx((3e-5, 3 / 4 * 4e-3, 0.0))
    assert collective_cost("reduce", 4 * MB, range(4), links()) == collective_cost("gather", 4 * MB, range(4), links())
    assert collective_cost("sum", 4 * MB, [3], links()) == NOTHING


def test_a_ring_over_two_hosts_uses_the_cards_of_all_its_ranks() -> None:
    whole = collective_cost("gather", 8 * MB, range(8), links())
    assert whole.work_s == pytest.approx(7 / 8 * 8 * MB / 4e8)
    assert whole.latency_s == pytest.approx(7e-4)
    alone = collective_cost("gather", 8 * MB, (0, 4), links())
    assert alone.work_s == pytest.approx(1 / 2 * 8 * MB / 1e8)


def test_groups_that_share_a_card_have_a_part_of_it_each() -> None:
    whole = collective_cost("gather", 8 * MB, range(8), links(shared=True))
    assert whole.work_s == pytest.approx(7 / 8 * 8 * MB / 1e8), "one ring for the card"
    one_of_four = collective_cost("gather", 8 * MB, (0, 4), links(shared=True))
    assert one_of_four.work_s == pytest.approx(1 / 2 * 8 * MB / 1e8 * 4), "four rings for it"


def test_messages() -> None:
    assert message_cost(MB, 0, 3, links()) == pytest.approx((1e-5, 1e-3, 0.0))
    assert message_cost(MB, 3, 4, links()) == pytest.approx((1e-4, 1e-2, 0.0))
    assert message_cost(MB, 3, 4, links(shared=True)) == pytest.approx((1e-4, 4e-2, 0.0))


def test_swaps_go_to_each_peer_directly() -> None:
    assert collective_cost("swap", 8 * MB, range(4), links()) == pytest.approx((1e-5, 3 / 4 * 8e-3, 0.0))
    assert collective_cost("swap", 8 * MB, range(8), links()).work_s == pytest.approx(4 / 8 * 8 * MB / 1e8)


def test_a_kind_of_exchange_may_have_figures_of_its_own() -> None:
    gather = {"latency_s": 0.0, "bandwidth": 1e9, "overlap": 0.0}
    own = links(sum={"latency_s": 0.0, "bandwidth": 5e8}, send={"latency_s": 0.5, "bandwidth": 1e9}, gather=gather)
    assert collective_cost("sum", 4 * MB, range(4), own) == pytest.approx((0.0, 2 * 3 / 4 * 8e-3, 0.0))
    assert collective_cost("gather", 4 * MB, range(4), own).work_s == 0.0
    assert collective_cost("reduce", 4 * MB, range(4), own) == pytest.approx((3e-5, 3e-3, 0.0))
    assert message_cost(MB, 0, 1, own).latency_s == 0.5


@pytest.mark.parametrize(
    "cost",
    [
        lambda links: collective_cost("gather", 4 * MB, range(4), links),
        lambda links: collective_cost("swap", 4 * MB, range(4), links),
        lambda links: message_cost(4 * MB, 0, 1, links),
    ],
    ids=["ring", "swap", "message"],
)
def test_what_does_not_overlap_is_work_of_who_waits(cost) -> None:
    """It takes as long in all, where nothing is computed beside it."""
    whole, half, none = (cost(links(overlap=overlap)) for overlap in (1.0, 0.5, 0.0))
    assert half == pytest.approx((whole.latency_s / 2, whole.work_s / 2, sum(whole) / 2))
    assert none == pytest.approx((0.0, 0.0, sum(whole)))


def test_a_link_that_the_file_does_not_have_is_told() -> None:
    with pytest.raises(PlanError, match="other_host"):
        message_cost(MB, 0, 4, LinksTable.model_validate({"ranks_per_host": 4}))
    with pytest.raises(PlanError, match="same_host"):
        collective_cost("sum", MB, (0, 1), LinksTable())


def test_of_groups_that_lie_on_hosts_in_different_ways_the_slowest_counts() -> None:
    topology = Topology.from_sizes(
        12, pp=2, sp=3
    )  # hosts of ranks 0-3, 4-7, 8-11; the first group lies on one host, the second crosses
    first, crossing = range(3), range(3, 6)
    assert tuple(crossing) in topology.partition("sp")
    groups = concurrent_groups(topology, "sp", 4, tuple(first))
    assert slowest_cost("swap", MB, groups, links()) == collective_cost("swap", MB, crossing, links())
    assert [len(concurrent_groups(topology, "sp", per_host)) for per_host in (3, 4, 12)] == [1, 2, 1]


def test_ties_of_all_ranks_of_a_stage_are_priced() -> None:
    topology = Topology.from_sizes(6, pp=2)  # rank 0 and 3 share a host of four, 1 and 4 do not
    groups = concurrent_groups(topology, "tie[a]", 4, (0, 3))
    assert slowest_cost("sum", MB, groups, links()) == collective_cost("sum", MB, (1, 4), links())


def test_of_messages_between_two_stages_the_slowest_counts() -> None:
    topology = Topology.from_sizes(6, pp=2)
    assert slowest_message_cost(MB, (0, 1), topology, links()) == message_cost(MB, 1, 4, links())
    assert slowest_message_cost(MB, (0, 1), topology, links(per_host=6)) == message_cost(MB, 0, 3, links(per_host=6))
    assert slowest_message_cost(MB, (0, 1), Topology.from_sizes(16, pp=2), links()) == message_cost(MB, 0, 8, links())

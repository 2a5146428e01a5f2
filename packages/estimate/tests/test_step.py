"""Tests simulated steps against steps computed by hand: channels, links, hosts and copies; and the costs of exchanges."""

import math
import random
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
from sley_estimate.bytes.fake_tensors import FakeTensors, Ledger
from sley_estimate.bytes.fake_world import FakeDevice
from sley_estimate.bytes.rank import build_rank0_draft
from sley_estimate.calibrate import device as devices
from sley_estimate.calibrate.device import MICROBATCH_COUNTS, WEIGHT_COUNTS, measure_engine, measure_host, solve_engine_table
from sley_estimate.layers.operators import Operator
from sley_estimate.layers.times import LayerSeconds, host_operators_s
from sley_estimate.machine import (
    NO_COST,
    Cost,
    EngineTable,
    LinksTable,
    collective_cost,
    concurrent_groups,
    copy_cost,
    machine_from_dict,
    message_cost,
    slowest_cost,
    slowest_message_cost,
)
from sley_estimate.step.estimate import estimate_plan
from sley_estimate.step.simulate import Await, Compute, Exchange, ProgramSimulator
from sley_estimate.testing import simulate_without_plan, small_machine, timed_layers
from sley_testing.plans import small_plan
from sley_testing.runs import random_action_lists


@pytest.mark.parametrize("seed", range(6))
def test_step_without_shared_links_equals_simulated_actions(seed):
    """The lists are random. Each pair of stages has one message at a time in one direction, as in `simulate`."""
    rng = random.Random(seed)
    placement, micros = loop(rng.randint(2, 4), rng.randint(1, 2)), rng.randint(1, 6)
    lowered = lower(random_action_lists(placement, micros, rng), placement, micros)
    even = Costs.uniform(placement.num_positions, forward=1.0, input_gradient=1.25, weight_gradient=0.5)
    layers = [[LayerSeconds(1.0, 1.75, 1.25, 0.5)]] * placement.num_positions
    step = simulate_without_plan(lowered, placement, layers, [NO_COST] * (placement.num_positions - 1))
    assert step.timeline.spans == simulate(lowered, placement, even).timeline.spans


def test_message_delays_its_receiver():
    actions = [Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)]
    lists = lower([actions, actions], loop(2), 1)
    step = simulate_without_plan(lists, loop(2), [[LayerSeconds(1.0, 2.0)]] * 2, [Cost(0.25, 0.5)])
    assert step.seconds == pytest.approx(6 + 2 * 0.75)
    assert step.exposed_s(0) == {"down": pytest.approx(0.75 + 3.0 + 0.75)}


def simulate_ends(*programs):
    """Returns the seconds at which each program ends."""
    simulator = ProgramSimulator(programs)
    simulator.run()
    return simulator.ends_s


def test_exchanges_share_a_link():
    first, second = (Exchange(key, f"channel {key}", (rank,), 0.0, 2.0, links=("card",)) for rank, key in enumerate("ab"))
    assert simulate_ends([first, Await("a")], [second, Await("b")]) == [4.0, 4.0]
    other_link = second._replace(links=("other card",))
    assert simulate_ends([first, Await("a")], [other_link, Await("b")]) == [2.0, 2.0]


def test_exchange_waits_for_its_channel_and_for_all_members():
    exchange = Exchange("x", "channel", (0, 1), 0.0, 1.0)
    earlier = Exchange("y", "channel", (0,), 0.0, 5.0)
    equal = exchange._replace(transfer_s=1.01)  # another stage has a few more bytes in the totals of a step
    programs = [earlier, exchange, Await("x")], [Compute(2.0), equal, Await("x")]
    assert simulate_ends(*programs) == [6.0, 6.0]


@pytest.mark.parametrize(("computing", "end"), [(0.0, 3.0), (1.0, 3.0), (5.0, 6.0)], ids=["at once", "early", "late"])
def test_waiting_member_works_for_the_part_without_overlap(computing, end):
    """Two of three seconds overlap with computing. The second member does not wait and does not work."""
    exchange = Exchange("x", "channel", (0, 1), *Cost(0.0, 3.0).split_overlap(2 / 3))
    simulator = ProgramSimulator([[exchange, Compute(computing), Await("x")], [exchange]])
    simulator.run()
    assert simulator.ends_s == pytest.approx([end, 0.0])
    (wait,) = simulator.exposed_waits
    assert wait.end_s - wait.start_s == pytest.approx(end - computing)


def test_endless_wait_is_refused():
    exchange = Exchange("x", "channel", (0, 1), 0.0, 1.0)
    with pytest.raises(PlanError, match="program 0 waits for x"):
        simulate_ends([exchange, Await("x")], [Compute(1.0)])


def test_exchange_waits_for_the_exchange_before_it():
    """The earlier exchange has another channel. It may have ended before the later one begins."""
    earlier = Exchange("out", "to_host", (0,), 0.0, 2.0)
    later = Exchange("in", "to_device", (0,), 0.0, 3.0, after="out")
    assert simulate_ends([earlier, later, Await("in"), Compute(1.0)]) == [6.0]
    assert simulate_ends([earlier, Await("out"), later, Await("in")]) == [5.0]


CPU = torch.device("cpu")
ENGINE = {"step_s": 1e-6, "parameter_s": 1e-8, "micro_s": 1e-7, "gradient_s": 1e-8}
NARROW = LayerSeconds(1.0, 2.0, 1.0, 1.0, host_forward=2.0, host_backward=3.0)
WIDE = LayerSeconds(4.0, 8.0, 4.0, 4.0, host_forward=2.0, host_backward=3.0)


@pytest.mark.parametrize(
    ("layers", "device_s", "host_s"), [([NARROW] * 2, 6, 10), ([WIDE] * 2, 24, 10), ([NARROW, WIDE], 15, 10)]
)
def test_host_recovers_in_wide_layers_from_narrow_ones(layers: list[LayerSeconds], device_s: float, host_s: float) -> None:
    """A step is as long as the device or the host needs for all layers."""
    actions = [Action(kind, 0, micro) for micro in range(3) for kind in (Kind.FORWARD, Kind.BACKWARD)]
    step = simulate_without_plan(lower([actions], loop(1), 3), loop(1), [layers], [])
    assert step.devices_s == pytest.approx(3 * device_s)
    assert step.host_s == (pytest.approx(3 * host_s),)
    assert step.seconds == pytest.approx(3 * max(device_s, host_s))
    assert step.timeline.idle_share(0) == pytest.approx(1 - 3 * device_s / step.seconds)


def plan_of(**changes: Any) -> Plan:
    data = {"use": "data.text", "source": "python-stdlib", "sequence": 24}
    return plan_from_dict(small_plan(**{"data": data, "precision": {"compute": "fp32"}, **changes}))


def count_parameters(plan: Plan) -> int:
    return len({id(value) for layer in build_rank0_draft(plan, 1).model.layers for value in layer.module.parameters()})


@pytest.mark.sample(1)
@pytest.mark.parametrize("host", [0.01, 3.0])
def test_host_seconds_are_those_of_layers_and_engine(host: float) -> None:
    plan = plan_of()
    layers = timed_layers(plan, host=host, launch_s=0.0)
    machine = machine_from_dict(small_machine(device__launch_s=0.0, layers=layers, engine=ENGINE))
    estimate, num_microbatches = estimate_plan(plan, 1, machine), plan.num_microbatches(plan.topology(1))
    engine_s = EngineTable(**ENGINE).step_seconds(count_parameters(plan), num_microbatches)
    layers_s = sum(layer.seconds.forward + layer.seconds.backward for layer in estimate.layers) * num_microbatches
    # The first recorded microbatch has fewer operators than the others.
    assert estimate.step.host_s == (pytest.approx(host * layers_s + engine_s, rel=0.02),)
    assert (estimate.step.seconds > estimate.step.devices_s) == (host > 1)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("changes", "host_waits"),
    [
        ({"precision": {"compute": "fp16"}}, True),
        ({"optimizer": {"factory": "torch.optim:RMSprop", "lr": 1e-3}}, True),
        ({"optimizer": {"use": "core.sgd", "lr": 1e-3}}, False),
    ],
)
def test_host_waits_before_an_update_that_the_device_cannot_skip(changes: dict[str, Any], host_waits: bool) -> None:
    """The device is then idle while the host starts the update."""
    small: Any = {"model__num_layers": 1, "batch": {"global_size": 2, "micro_size": 2}}
    plan, matmul = plan_of(**small, **changes), {name: {"flops_per_s": 1e11} for name in ("fp16", "fp32")}
    slow_s, fast_s = (
        estimate_plan(plan, 1, machine_from_dict(small_machine(engine=ENGINE | {"parameter_s": value}, device__matmul=matmul)))
        for value in (1e-3, 0.0)
    )
    wait_s = count_parameters(plan) * 1e-3 if host_waits else 0.0
    assert slow_s.step.devices_s - fast_s.step.devices_s == pytest.approx(wait_s, abs=1e-9)


def test_engine_table_is_solved_from_exact_seconds() -> None:
    table = EngineTable(**ENGINE)
    seconds = {(count, micros): table.step_seconds(count, micros) for count in WEIGHT_COUNTS for micros in MICROBATCH_COUNTS}
    assert solve_engine_table(seconds).model_dump() == pytest.approx(ENGINE)
    constant = solve_engine_table(dict.fromkeys(seconds, 1.0))
    assert constant.model_dump() == pytest.approx({"step_s": 1.0, "parameter_s": 0.0, "micro_s": 0.0, "gradient_s": 0.0})


def test_engine_is_measured_by_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures are those of a CPU, whose machine files do not have them."""
    monkeypatch.setattr(devices, "NUM_TURNS", 2)
    with World.alone("cpu") as world:
        table = measure_engine(world.device, plan_from_dict(small_plan(precision={"compute": "bf16"})))
    assert table.keys() == ENGINE.keys()
    assert all(0.0 <= value < 1.0 and math.isfinite(value) for value in table.values())
    many, few = (EngineTable(**table).step_seconds(count, 1) for count in (1000, 10))
    assert many > 2 * few > 0, "weights take time"


class CopyRecording:
    """Records the copies, by number, and then the waits of a fake device."""

    def __init__(self):
        self.events = []

    def on_copy(self, *copy):
        self.events.append(copy)
        return len(self.events) - 1

    def on_wait(self, number):
        self.events.append(("wait", number))


def test_wait_for_a_copy_includes_earlier_copies_on_its_stream() -> None:
    tensors, recording = FakeTensors(Ledger()), CopyRecording()
    with tensors.patch_torch(), tensors:
        device = FakeDevice(CPU, tensors=tensors, recording=recording, runs_ahead=True)
        target, host = torch.empty(4).view(torch.uint8), device.host_memory(16).data
        to_host, to_device = device.copy_stream(), device.copy_stream()
        to_host.copy(host, target)
        first = to_host.record()
        to_host.copy(host, target)
        to_device.wait_for(to_host.record())
        to_device.copy(target, host)
        assert not first.is_done()
        to_host.record().make_device_wait()
        assert first.is_done()
        first.wait()
        assert not to_device.record().is_done()
        to_device.record().wait()
    copies = [("to_host", 0, 16, None), ("to_host", 0, 16, None), ("to_device", 1, 16, 1)]
    assert recording.events == [*copies, *(("wait", number) for number in range(3))]


def test_copy_needs_its_latency_and_the_bandwidth_of_its_direction() -> None:
    table = {"to_host": 1e9, "to_device": 2e9, "latency_s": 1e-5, "memory_bandwidth": 4e9}
    machine = machine_from_dict(small_machine(host=table))
    assert copy_cost("to_host", 10**6, machine) == (1e-5, 1e-3, 0.0)
    assert copy_cost("to_device", 10**6, machine) == (1e-5, 5e-4, 0.0)
    assert host_operators_s([Operator("adamw", 10**6), Operator("copy", 10**6)], machine) == 5e-4


def test_only_a_cpu_copies_without_a_host_table() -> None:
    cpu = machine_from_dict(small_machine(device__kind="cpu"))
    assert copy_cost("to_host", 10**6, cpu) == (cpu.device.launch_s, 2e6 / cpu.device.memory_bandwidth, 0.0)
    assert host_operators_s([Operator("adamw", 10**6)], cpu) == cpu.device.launch_s + 1e6 / cpu.device.memory_bandwidth
    with pytest.raises(PlanError, match="machine-host"):
        copy_cost("to_host", 1, machine_from_dict(small_machine()))
    with pytest.raises(PlanError, match="machine-host"):
        host_operators_s([Operator("adamw", 1)], machine_from_dict(small_machine(host={"to_host": 1e9, "to_device": 1e9})))


def test_measured_copies_make_a_host_table() -> None:
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


@pytest.mark.parametrize(("shared", "num_cards", "num_rings"), [(False, 4, 1), (True, 1, 4)])
def test_ring_over_two_hosts_uses_its_network_cards(shared: bool, num_cards: int, num_rings: int) -> None:
    """One ring of all ranks uses all cards of a host. Four rings of two ranks have a card each, or share one."""
    full_ring, small_ring = (collective_cost("gather", 8 * MB, ranks, links(shared=shared)) for ranks in (range(8), (0, 4)))
    assert full_ring == pytest.approx((7e-4, 7 / 8 * 8 * MB / (num_cards * 1e8), 0.0))
    assert small_ring == pytest.approx((1e-4, 1 / 2 * 8 * MB / 1e8 * num_rings, 0.0))


def test_rings_of_one_host_swaps_and_messages() -> None:
    assert collective_cost("sum", 4 * MB, range(4), links()) == pytest.approx((6e-5, 2 * 3 / 4 * 4e-3, 0.0))
    assert collective_cost("gather", 4 * MB, range(4), links()) == pytest.approx((3e-5, 3 / 4 * 4e-3, 0.0))
    assert collective_cost("reduce", 4 * MB, range(4), links()) == collective_cost("gather", 4 * MB, range(4), links())
    assert collective_cost("sum", 4 * MB, [3], links()) == NO_COST
    assert message_cost(MB, 0, 3, links()) == pytest.approx((1e-5, 1e-3, 0.0))
    assert message_cost(MB, 3, 4, links()) == pytest.approx((1e-4, 1e-2, 0.0))
    assert message_cost(MB, 3, 4, links(shared=True)) == pytest.approx((1e-4, 4e-2, 0.0))
    assert collective_cost("swap", 8 * MB, range(4), links()) == pytest.approx((1e-5, 3 / 4 * 8e-3, 0.0))
    assert collective_cost("swap", 8 * MB, range(8), links()).transfer_s == pytest.approx(4 / 8 * 8 * MB / 1e8)


def test_kinds_of_exchanges_have_their_own_figures() -> None:
    gather = {"latency_s": 0.0, "bandwidth": 1e9, "overlap": 0.0}
    own = links(sum={"latency_s": 0.0, "bandwidth": 5e8}, send={"latency_s": 0.5, "bandwidth": 1e9}, gather=gather)
    assert collective_cost("sum", 4 * MB, range(4), own) == pytest.approx((0.0, 2 * 3 / 4 * 8e-3, 0.0))
    assert collective_cost("gather", 4 * MB, range(4), own).transfer_s == 0.0
    assert collective_cost("reduce", 4 * MB, range(4), own) == pytest.approx((3e-5, 3e-3, 0.0))
    assert message_cost(MB, 0, 1, own).latency_s == 0.5


@pytest.mark.parametrize("kind", ["gather", "swap", "message"])
def test_overlap_splits_a_cost(kind: str) -> None:
    tables = (links(overlap=overlap) for overlap in (1.0, 0.5, 0.0))
    full, half, none = (
        message_cost(4 * MB, 0, 1, table) if kind == "message" else collective_cost(kind, 4 * MB, range(4), table)
        for table in tables
    )
    assert half == pytest.approx((full.latency_s / 2, full.transfer_s / 2, sum(full) / 2))
    assert none == pytest.approx((0.0, 0.0, sum(full)))


def test_missing_link_is_named() -> None:
    with pytest.raises(PlanError, match="other_host"):
        message_cost(MB, 0, 4, LinksTable.model_validate({"ranks_per_host": 4}))
    with pytest.raises(PlanError, match="same_host"):
        collective_cost("sum", MB, (0, 1), LinksTable())


def test_slowest_of_differently_placed_groups_counts() -> None:
    """On hosts with four ranks, the first group is on one host, and the second on two."""
    topology = Topology.from_sizes(12, pp=2, sp=3)
    first, crossing = range(3), range(3, 6)
    assert tuple(crossing) in topology.partition("sp")
    assert slowest_cost("swap", MB, topology, "sp", links(), tuple(first)) == collective_cost("swap", MB, crossing, links())
    assert [len(concurrent_groups(topology, "sp", per_host)) for per_host in (3, 4, 12)] == [1, 2, 1]


def test_slowest_tie_and_message_of_two_stages_count() -> None:
    topology = Topology.from_sizes(6, pp=2)  # ranks 0 and 3 share a host of four, 1 and 4 do not
    assert slowest_cost("sum", MB, topology, "tie[a]", links(), (0, 3)) == collective_cost("sum", MB, (1, 4), links())
    assert slowest_message_cost(MB, (0, 1), topology, links()) == message_cost(MB, 1, 4, links())
    assert slowest_message_cost(MB, (0, 1), topology, links(per_host=6)) == message_cost(MB, 0, 3, links(per_host=6))
    assert slowest_message_cost(MB, (0, 1), Topology.from_sizes(16, pp=2), links()) == message_cost(MB, 0, 8, links())

"""Copies to the host in a fake world: who is told what, in which order they run, and in longer steps than were recorded."""

from __future__ import annotations

import pytest
import torch

from sley_core.actions.action import Action, Kind
from sley_core.comm.device import Device
from sley_core.errors import PlanError
from sley_estimate.bytes.fake_copies import FakeCopies
from sley_estimate.bytes.fake_tensors import FakeTensors
from sley_estimate.bytes.ledger import Ledger, StepPlace
from sley_estimate.calibrate.host import measure_host
from sley_estimate.layers.operators import Operator
from sley_estimate.machine.read import machine_from_dict
from sley_estimate.recorded.expand import expanded
from sley_estimate.recorded.words import HOST, Awaited, Began, RecordedStep, Worked
from sley_estimate.seconds.host_copies import copy_cost, on_host_s
from sley_estimate.seconds.lanes import Lanes
from sley_estimate.seconds.program import Await, Begin, Compute, Exchange
from sley_estimate.testing.machines import small_machine


class Heard:
    def __init__(self):
        self.words = []

    def copied(self, kind, stream, num_bytes, after):
        self.words.append((kind, stream, num_bytes, after))
        return len([word for word in self.words if len(word) == 4]) - 1

    def awaited(self, number):
        self.words.append(("awaited", number))


@pytest.fixture
def fake():
    tensors = FakeTensors(Ledger(lambda: StepPlace(1, "", "")))

    def made(*, runs_ahead):
        copies = FakeCopies(tensors, runs_ahead=runs_ahead)
        copies.listener = Heard()
        with tensors:
            device = torch.empty(4)
        return copies, device.view(torch.uint8), copies.memory(16).data

    with tensors.watched():
        yield made


def test_a_copy_that_runs_ahead_is_awaited_with_all_before_it_on_its_stream(fake) -> None:
    copies, device, host = fake(runs_ahead=True)
    out, into = copies.stream(), copies.stream()
    out.copy(host, device)
    first = out.record()
    out.copy(host, device)
    out.copy(host, device)
    into.after(out.record())
    into.copy(device, host)
    assert not first.is_done()
    out.record().hold_device()
    assert first.is_done()
    first.wait()
    assert not into.record().is_done()
    into.record().wait()
    assert copies.listener.words == [
        ("to_host", 0, 16, None),
        ("to_host", 0, 16, None),
        ("to_host", 0, 16, None),
        ("to_device", 1, 16, 2),
        ("awaited", 0),
        ("awaited", 1),
        ("awaited", 2),
        ("awaited", 3),
    ]


def test_on_a_cpu_each_copy_is_awaited_at_once(fake) -> None:
    copies, device, host = fake(runs_ahead=False)
    stream = copies.stream()
    stream.copy(host, device)
    assert copies.listener.words == [("to_host", 0, 16, None), ("awaited", 0)]
    assert stream.record().is_done()


def test_an_exchange_waits_for_the_one_that_it_comes_after() -> None:
    """On another lane, begun at once; and where that has ended before."""
    out = Exchange("out", "to_host", (0,), 0.0, 2.0)
    into = Exchange("in", "to_device", (0,), 0.0, 3.0, after="out")
    lanes = Lanes([[Begin(out), Begin(into), Await("in"), Compute(1.0)]])
    lanes.run()
    assert lanes.ends_s == [6.0]
    assert [(span.key, span.start_s, span.end_s) for span in lanes.exchanged] == [("out", 0.0, 2.0), ("in", 2.0, 5.0)]
    late = Lanes([[Begin(out), Await("out"), Begin(into), Await("in")]])
    late.run()
    assert late.ends_s == [5.0]


def test_copies_of_a_longer_step_follow_and_are_awaited_as_in_the_one_that_was_recorded() -> None:
    work = Worked((Operator("mm", 8),))

    def action(micro, number):
        out = Began(number, "to_host", HOST, "0", 16)
        back = Began(number + 1, "to_device", HOST, "1", 16, after=number)
        return Action(Kind.FORWARD, 0, micro), (work, out, back, Awaited(number + 1))

    step = RecordedStep((), [action(0, 0), action(1, 2)], ())
    longer = expanded(step, [Action(Kind.FORWARD, 0, micro) for micro in range(5)])
    began = [word for word in longer.words if isinstance(word, Began)]
    assert len({word.number for word in began}) == 10
    for out, back in zip(began[::2], began[1::2], strict=True):
        assert back.after == out.number
    assert [word.number for word in longer.words if isinstance(word, Awaited)] == [one.number for one in began[1::2]]


def test_a_copy_takes_its_latency_and_its_bytes_at_the_rate_of_its_direction() -> None:
    table = {"to_host": 1e9, "to_device": 2e9, "latency_s": 1e-5, "memory_bandwidth": 4e9}
    machine = machine_from_dict(small_machine(host=table))
    assert copy_cost("to_host", 10**6, machine) == (1e-5, 1e-3, 0.0)
    assert copy_cost("to_device", 10**6, machine) == (1e-5, 5e-4, 0.0)
    assert on_host_s([Operator("adamw", 10**6), Operator("copy", 10**6)], machine) == 5e-4


def test_a_cpu_without_a_table_copies_at_its_bandwidth_and_a_gpu_is_refused() -> None:
    cpu = machine_from_dict(small_machine(device__kind="cpu"))
    assert copy_cost("to_host", 10**6, cpu) == (cpu.device.launch_s, 2e6 / cpu.device.memory_bandwidth, 0.0)
    with pytest.raises(PlanError, match="machine-host"):
        copy_cost("to_host", 1, machine_from_dict(small_machine()))
    with pytest.raises(PlanError, match="machine-host"):
        on_host_s([Operator("adamw", 1)], machine_from_dict(small_machine(host={"to_host": 1e9, "to_device": 1e9})))


def test_copies_are_measured_on_this_machine_and_make_a_table() -> None:
    table = measure_host(Device(torch.device("cpu")))
    assert set(table) == {"to_host", "to_device", "latency_s"}
    assert machine_from_dict(small_machine(device__kind="cpu", host=table)).host is not None
    assert 1e8 < table["to_device"] < 1e12

"""What is timed waits for no launch: the device is kept at work for longer than the host takes to start a layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from sley_core.comm.device import Device
from sley_estimate.bench import layer_bench, lead
from sley_estimate.bench.layer_bench import HOST_CALLS, NEARLY, LayerBench
from sley_estimate.bench.layer_calls import Half
from sley_estimate.bench.lead import Lead, seconds_of_an_empty_backward
from sley_testing.live_bytes import memory_profile, peak_bytes


@dataclass(frozen=True)
class Queue(Device):
    """A device that works through a queue: each write takes it `write_s`, whatever the host takes."""

    write_s: float = 1e-3
    writes: list[int] = field(default_factory=list)

    @property
    def is_async(self) -> bool:
        return True

    def moment(self) -> float:
        return len(self.writes) * self.write_s

    def seconds_between(self, first: object, last: object) -> float:
        assert isinstance(first, float)
        assert isinstance(last, float)
        return last - first


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    device = Queue(torch.device("cpu"))
    zero = torch.Tensor.zero_

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        device.writes.append(tensor.nbytes)
        return zero(tensor)

    monkeypatch.setattr(torch.Tensor, "zero_", counted)
    monkeypatch.setattr(lead, "WRITTEN_BYTES", {"cpu": 1 << 10})
    return device


@pytest.mark.parametrize(("host_s", "writes"), [(0.0, 1), (1e-4, 2), (1e-3, 3), (10e-3, 16)])
def test_writes_take_half_as_long_again_as_the_host(queue: Queue, host_s: float, writes: int) -> None:
    led = Lead(queue)
    queue.writes.clear()
    led(host_s)
    assert queue.writes == [1 << 10] * writes


def test_a_cpu_is_given_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lead, "WRITTEN_BYTES", {"cpu": 1 << 10})
    led = Lead(Device(torch.device("cpu")))
    led._memory.fill_(1)
    led(10.0)
    assert not led._memory.any()


def test_what_a_cpu_writes_is_not_memory_that_a_run_keeps() -> None:
    with memory_profile() as profile:
        Lead(Device(torch.device("cpu")))()
    assert peak_bytes(profile) == 0


def test_a_backward_through_nothing_takes_the_host_some_microseconds() -> None:
    assert 1e-6 < seconds_of_an_empty_backward(Device(torch.device("cpu"))) < 1e-2


class Gradients:
    """Notes whether they are dropped."""

    def __init__(self) -> None:
        self.are_dropped = False

    @contextmanager
    def dropped(self) -> Iterator[None]:
        self.are_dropped = True
        yield
        self.are_dropped = False


@pytest.mark.parametrize(("device_s", "host_s"), [(5e-3, 1e-3), (1e-3, 5e-3), (1e-3, 1.5e-3), (1e-3, 0.7e-3)])
def test_of_a_layer_both_what_the_device_takes_and_its_host_are_told(
    queue: Queue, device_s: float, host_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Medians; that of the host with an idle device is the lead of the calls that are counted. Its own are of calls in a row,
    for some time, since it is disturbed for some time; of single calls if the device takes much longer. Gradients are dropped
    meanwhile.
    """
    monkeypatch.setattr(layer_bench, "HOST_S", 0.01)
    bench, gradients = object.__new__(LayerBench), Gradients()
    bench.device, bench.repetitions, bench._gradients = queue, 4, gradients
    asked, rows = [], []

    def call(leads: tuple[float, float]) -> tuple[Half, Half]:
        asked.append(leads)
        late = 7.0 if len(asked) in (1, 2 + HOST_CALLS) else 0.0
        mine = 1e-4 if gradients.are_dropped else 0.0
        return Half(device_s + late, host_s - mine), Half(2 * device_s, host_s + late - mine)

    def in_a_row() -> tuple[float, float]:
        assert gradients.are_dropped
        rows.append(7.0 if not rows else 0.0)
        return host_s - 2e-4 + rows[-1], host_s - 1e-4

    found = bench._medians(call, in_a_row)
    is_near = host_s > NEARLY * device_s
    alone = [(0.0, 0.0)] * HOST_CALLS
    assert asked == [(0.0, 0.0), *alone, *[(host_s, host_s)] * 4, *([] if is_near else alone)]
    assert (len(rows) > 1) == is_near
    assert [half.device_s for half in found] == pytest.approx([device_s, 2 * device_s])
    expected = [host_s - 2e-4, host_s - 1e-4] if is_near else [host_s - 1e-4] * 2
    assert [half.host_s for half in found] == pytest.approx(expected)

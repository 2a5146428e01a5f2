"""What is timed waits for no launch: the device is kept at work for longer than the host takes to start a layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from sley_core.comm.device import Device
from sley_core.engine import layer_bench, lead
from sley_core.engine.layer_bench import HOST_CALLS, LayerBench, _Timed
from sley_core.engine.lead import Lead, seconds_of_an_empty_backward


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


def test_a_backward_through_nothing_takes_the_host_some_microseconds() -> None:
    assert 1e-6 < seconds_of_an_empty_backward(Device(torch.device("cpu"))) < 1e-2


@pytest.mark.parametrize(("device_s", "host_s"), [(5e-3, 1e-3), (1e-3, 5e-3)])
def test_a_layer_takes_what_the_slower_of_device_and_host_takes(
    queue: Queue, device_s: float, host_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Medians; that of the host with an idle device is the lead of the calls that are counted. Where the host is slower there
    are more of them, since it is disturbed for some time.
    """
    monkeypatch.setattr(layer_bench, "HOST_S", 0.01)
    bench = object.__new__(LayerBench)
    bench.device, bench.repetitions = queue, 4
    asked = []

    def call(leads: tuple[float, float]) -> tuple[_Timed, _Timed]:
        asked.append(leads)
        is_first, led = len(asked) == 1, len(asked) - 1 - HOST_CALLS
        disturbed = 7.0 if led == 1 else 0.0
        return _Timed(device_s + is_first, host_s + disturbed), _Timed(2 * device_s, host_s)

    found = bench._medians(call)
    assert found == (max(device_s, host_s), max(2 * device_s, host_s))
    assert asked[: 1 + HOST_CALLS] == [(0.0, 0.0)] * (1 + HOST_CALLS)
    led = asked[1 + HOST_CALLS :]
    assert set(led) == {(host_s, host_s)}
    assert len(led) == 4 if host_s < device_s else len(led) > 4


def test_a_layer_that_waits_for_the_device_does_not_take_the_lead(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_bench, "HOST_S", 0.0)
    bench = object.__new__(LayerBench)
    bench.device, bench.repetitions = queue, 2

    def call(leads: tuple[float, float]) -> tuple[_Timed, _Timed]:
        return (_Timed(1e-3, 2e-3 + 1.5 * leads[0]),) * 2

    assert bench._medians(call) == (2e-3, 2e-3)

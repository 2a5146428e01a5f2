"""How fast a host steps weights is measured with the copies that a run makes beside it."""

from __future__ import annotations

import pytest

from sley_estimate.calibrate.host import HostStepping, host_bandwidth
from sley_estimate.testing.short_calibration import shortly
from sley_testing.drawn_copies import DrawnDevice


@pytest.mark.parametrize("order", range(5))
def test_buckets_are_stepped_and_leave_whenever_copies_happen(order: int) -> None:
    """Gradients are there when they are stepped with, and each bucket leaves as it was rounded."""
    device = DrawnDevice(order=order)
    with shortly(), device.watching():
        stepping = HostStepping(device)
        assert stepping.step() > 0
        first = [float(one.detach()[0]) for one in stepping.parameters]
        stepping.step()
    assert len(set(first)) == 1
    assert first[0] < 1.0, "a step against a gradient of 1"
    for parameter in stepping.parameters:
        assert parameter.detach().unique().numel() == 1
        assert float(parameter.detach()[0]) < first[0]
    assert stepping.sent.equal(stepping.parameters[-1].detach().bfloat16())


def test_the_bandwidth_is_one_that_machines_have() -> None:
    with shortly():
        assert 1e6 < host_bandwidth(DrawnDevice()) < 1e13

"""Keeps a device at work while the host starts what is timed there, as in a run, whose host is ahead of its device.

host     start writes | start the layer |
device   write write write write write  | the layer, and no wait for a launch |
"""

from __future__ import annotations

import time
from math import ceil
from statistics import median
from typing import TYPE_CHECKING

import torch

from sley_core.comm.copies import HostMemory
from sley_core.engine.execute import InFlight, describe, edges_of

if TYPE_CHECKING:
    from sley_core.comm.device import Device

WRITTEN_BYTES = {"cpu": 1 << 26, "cuda": 1 << 28}
"""Bytes of one write, more than caches hold: in a run, other layers have filled them before a layer's turn."""

MORE = 1.5
"""How much longer than the host takes the device is kept at work: the host's seconds vary."""

TRIES = 20
"""Of what is timed here: small things, whose seconds vary."""


class Lead:
    """Writes to memory that nothing else uses, on `device`: calling it evicts the caches, and on a device that works through a
    queue it keeps that busy for a while.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        # On a CPU pages of the system, which gets them back: a run keeps what torch has freed.
        if device.torch_device.type == "cpu":
            self._memory = HostMemory(WRITTEN_BYTES["cpu"], lock=False).data
        else:
            self._memory = torch.empty(WRITTEN_BYTES["cuda"], dtype=torch.uint8, device=device.torch_device)
        self._write_s = self._seconds_of_a_write() if device.is_async else 0.0

    def __call__(self, host_s: float = 0.0) -> None:
        """Starts writes for longer than `host_s`, the host's seconds to start what follows; at least one."""
        more = ceil(MORE * host_s / self._write_s) if self._write_s else 0
        for _ in range(1 + more):
            self._memory.zero_()

    def _seconds_of_a_write(self) -> float:
        self._memory.zero_()
        began = self._device.moment()
        for _ in range(TRIES):
            self._memory.zero_()
        return self._device.seconds_between(began, self._device.moment()) / TRIES


def seconds_of_an_empty_backward(device: Device) -> float:
    """Returns the median of the host's seconds to run the backward of what only passes through: a run starts one for many
    layers.
    """
    value = torch.ones(1, device=device.torch_device)
    description, tensors = describe(value.requires_grad_())
    taken = []
    for _ in range(1 + TRIES):
        held = InFlight()
        output = held.enter(description, [tensor.detach() for tensor in tensors]).view(1)
        held.edges = edges_of(*describe(output))
        gradients = [torch.ones_like(value)]
        began = time.perf_counter()
        held.backward(gradients)
        taken.append(time.perf_counter() - began)
    return median(taken[1:])

"""Prices optimizer states that are not on the device: bytes that a layout does not hold, seconds of copies.

swapped      bucket 0 comes │ update │ bucket 1 comes while 0 leaves │ update │ ...       the slower way counts
on the host  gradients go   │ the host updates                      │ weights come        the slowest of the three counts
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from sley_core.draft import DTYPES, dtypes
from sley_core.records import steps_on_host
from sley_estimate.layers.operators import Operator
from sley_estimate.seconds.host_copies import copy_cost, on_host_s
from sley_estimate.stage_facts import moved_by_update

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan
    from sley_estimate.machine.tables import MachineFile
    from sley_estimate.search.choices import Choice

Stepping = Literal["here", "swapped", "on_host"]
"""Where optimizer states are: on the device, there only while their weights are stepped, or on the host, which steps them."""

ELEMENTS = 1 << 24
"""Of which seconds are asked, so that what starting a copy takes does not count."""


def stepping(offload: Choice | None) -> Stepping:
    """Returns where this manager, which works within steps, leaves optimizer states; "here" without one."""
    if offload is None:
        return "here"
    return "on_host" if steps_on_host(offload.record) else "swapped"


class StepCosts:
    """What an element costs that a rank steps, for a plan's optimizer on a machine. num_states: tensors like the weight."""

    def __init__(self, plan: Plan, machine: MachineFile, num_states: int) -> None:
        working, stepped = dtypes(plan)
        self._machine = machine
        self._working, self._gradient = working.itemsize, DTYPES[plan.precision.gradients].itemsize
        self._master = stepped.itemsize if stepped != working else 0
        self._states = num_states * stepped.itemsize
        self._moved = moved_by_update(plan, num_states)

    def state_bytes(self, where: Stepping) -> int:
        """Returns the bytes that a device holds, per element, of master and states between two steps. A CPU's memory is its
        host's.
        """
        if where == "swapped":
            return self._master
        on_cuda = self._machine.device.kind == "cuda"
        return 0 if where == "on_host" and on_cuda else self._master + self._states

    def update_s(self, where: Stepping) -> float:
        """Returns the seconds, per element, of norm and update, with the copies that they need.

        Raises PlanError "machine-host" for a machine file that does not say what they need.
        """
        here = self._moved / self._machine.device.memory_bandwidth
        if where == "here":
            return here
        each = [self._copied_s("to_host", self._states), self._copied_s("to_device", self._states)]
        if where == "on_host":
            there = on_host_s([Operator("update", self._moved * ELEMENTS)], self._machine) / ELEMENTS
            each = [self._copied_s("to_host", self._gradient), self._copied_s("to_device", self._working), there]
        if self._machine.device.kind == "cpu":  # copies are work of its own
            return sum(each) + (here if where == "swapped" else 0.0)
        return (
            here + max(each) if where == "swapped" else max(here, *each)
        )  # the norm is the device's work, in any case

    def _copied_s(self, kind: Literal["to_host", "to_device"], num_bytes: int) -> float:
        """Returns the seconds, per element, of copies of `num_bytes` for each."""
        cost = copy_cost(kind, num_bytes * ELEMENTS, self._machine)
        return (cost.latency_s + cost.work_s) / ELEMENTS

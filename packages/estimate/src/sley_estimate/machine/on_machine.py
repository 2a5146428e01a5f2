"""Says on which device a plan runs that leaves it open, where a machine is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sley_core.plan.load import with_values

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan
    from sley_estimate.machine.tables import MachineFile


def on_machine(plan: Plan, machine: MachineFile) -> Plan:
    """Returns `plan` with the kind of device of `machine` in place of `run.device = "auto"`; a plan that names one as it is.

    Estimated bytes are those of the plan's device: kernels of CUDA keep other tensors, and a CPU's memory is its host's.
    """
    return with_values(plan, {("run", "device"): machine.device.kind}) if plan.run.device == "auto" else plan

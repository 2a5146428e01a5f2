"""Prices copies between a device and its host, and what the host's cores do in a step. No torch in here.

On CUDA the two directions do not slow each other, and both run beside computing. A CPU copies by itself: each copy is work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from sley_core.errors import PlanError
from sley_estimate.layers.operators import Operator
from sley_estimate.machine.tables import MachineFile
from sley_estimate.seconds.layer_seconds import seconds_of
from sley_estimate.seconds.links import Cost

CopyKind = Literal["to_host", "to_device"]
"""Which way a copy goes."""


def copy_cost(kind: CopyKind, num_bytes: int, machine: MachineFile) -> Cost:
    """Returns the cost of one copy of `num_bytes` to the host, or to the device, alone on its link.

    Raises PlanError "machine-host" where the machine file of a CUDA device has no `[host]`. Of a CPU without it, the bandwidth
    of its memory tells: a copy moves twice its bytes.
    """
    host = machine.host
    if host is not None:
        bandwidth = host.to_host if kind == "to_host" else host.to_device
        return Cost(host.latency_s, num_bytes / bandwidth)
    if machine.device.kind == "cuda":
        raise _missing("[host]", "a step copies between the device and its host")
    return Cost(machine.device.launch_s, 2 * num_bytes / machine.device.memory_bandwidth)


def on_host_s(operators: Sequence[Operator], machine: MachineFile) -> float:
    """Returns the seconds of operators that the host's cores run, as those of an optimizer: their bytes over the host's
    bandwidth. A CPU is its own host, and they take there what any operators do.

    Raises PlanError "machine-host" where the file does not say how fast the host moves bytes.
    """
    if machine.device.kind == "cpu":
        return seconds_of(operators, machine.device)
    if machine.host is None or machine.host.memory_bandwidth is None:
        raise _missing("[host] memory_bandwidth", "the optimizer steps on the host")
    return sum(operator.num_bytes for operator in operators) / machine.host.memory_bandwidth


def _missing(key: str, what: str) -> PlanError:
    hint = "`train-cli calibrate` measures it on a machine with a CUDA device"
    return PlanError("machine-host", f"the machine file has no `{key}`, but {what}", hint=hint)

"""Tells the seconds of a layer on a device: measured ones where the machine file has them, else from the layer's operators.

An operator takes the longer of its products and its memory traffic. On a CPU the host's part comes in front of each. A GPU's
host starts kernels ahead of the device, so what counts of a phase is the slower of the two: small layers are bound by the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sley_core.actions.action import Kind
from sley_core.errors import PlanError
from sley_core.estimate.layers.operators import LayerWork, Operator
from sley_core.estimate.machine.tables import DeviceTable, LayerTable, MatmulTable


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one layer and one micro-batch. backward, input_gradient: with the recomputation in front of them."""

    forward: float
    backward: float
    input_gradient: float
    weight_gradient: float

    @classmethod
    def measured(cls, table: LayerTable) -> LayerSeconds:
        """Returns what a machine file says of a layer."""
        return cls(table.forward, table.backward, table.input_gradient, table.weight_gradient)

    @classmethod
    def computed(cls, work: LayerWork, device: DeviceTable) -> LayerSeconds:
        """Returns the seconds of a layer's operators on `device`; recomputation counts in front of each kind of backward.

        Raises PlanError "machine-matmul" for a product of a dtype of which the machine file says nothing.
        """
        again = seconds_of(work.recompute, device)
        return cls(
            forward=seconds_of(work.forward, device),
            backward=again + seconds_of(work.backward, device),
            input_gradient=again + seconds_of(work.input_gradient, device),
            weight_gradient=seconds_of(work.weight_gradient, device),
        )

    @classmethod
    def in_proportion(
        cls, work: LayerWork, there: LayerWork, measured: LayerSeconds, device: DeviceTable
    ) -> LayerSeconds:
        """Returns the seconds of a layer in proportion to a measured one: what its operators count, times measured over counted
        seconds of a layer that does the work `there` and took `measured`. Each phase has its own ratio; but recomputation that
        `there` lacks has that of the forward.

        Raises PlanError "machine-matmul" for a product of a dtype of which the machine file says nothing.
        """
        beside, counted = cls.computed(there, device), cls.computed(work, device)
        forward = _ratio(measured.forward, beside.forward)
        again_s = seconds_of(work.recompute, device)

        def back(kind: Kind) -> float:
            ratio = _ratio(measured.of(kind), beside.of(kind))
            again = ratio if there.recompute else forward
            return again_s * again + (counted.of(kind) - again_s) * ratio

        return cls(
            forward=counted.forward * forward,
            backward=back(Kind.BACKWARD),
            input_gradient=back(Kind.INPUT_GRADIENT),
            weight_gradient=counted.weight_gradient * _ratio(measured.weight_gradient, beside.weight_gradient),
        )

    def of(self, kind: Kind) -> float:
        """Returns the seconds that the layer adds to an action of `kind`; 0 where a chunk is only marked as done."""
        match kind:
            case Kind.FORWARD:
                return self.forward
            case Kind.BACKWARD:
                return self.backward
            case Kind.INPUT_GRADIENT:
                return self.input_gradient
            case Kind.WEIGHT_GRADIENT:
                return self.weight_gradient
            case Kind.CHUNK_DONE:
                return 0.0


def _ratio(measured_s: float, counted_s: float) -> float:
    """Returns measured over counted seconds; 1 where nothing was counted that could grow."""
    return measured_s / counted_s if counted_s > 0 else 1.0


def seconds_of(operators: Sequence[Operator], device: DeviceTable) -> float:
    """Returns the seconds of operators that follow each other: on CUDA the longer of the host's starts and the device's work,
    on a CPU both.

    Raises PlanError "machine-matmul" for a product of a dtype of which the machine file says nothing.
    """
    host_s = device.launch_s * len(operators)
    device_s = sum(_alone(operator, device) for operator in operators)
    return max(host_s, device_s) if device.kind == "cuda" else host_s + device_s


def _alone(operator: Operator, device: DeviceTable) -> float:
    """Returns the seconds of one operator on the device: the longer of its memory traffic and, for a product, of its FLOPs.

    Raises PlanError "machine-matmul" for a product of a dtype of which the machine file says nothing.
    """
    memory_s = operator.num_bytes / device.memory_bandwidth
    if not operator.flops:
        return memory_s
    found: MatmulTable | None = getattr(device.matmul, operator.dtype)
    if found is None:
        table = f"[device.matmul.{operator.dtype}]"
        message = f"the machine `{device.name}` has no `{table}`, and a layer multiplies {operator.dtype}"
        raise PlanError(
            "machine-matmul", message, hint="`train-cli calibrate` measures every dtype that the device has"
        )
    return max(memory_s, (operator.flops + found.half_flops) / found.flops_per_s)

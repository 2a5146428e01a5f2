"""Tells the seconds of a layer on a device: measured ones where the machine file has them, else from the layer's operators.

An operator takes the longer of its products and its memory traffic. On a CPU the host's part comes in front of each. A GPU's
host starts kernels ahead of the device. Of a layer that was measured both are known, what the device takes for it and what the
host takes to start it, and what counts of a step is the slower of the two (`result.py`); of one that is counted from its
operators the slower of the two counts in each phase: a launch is a rough figure, the same for all operators. What the host
takes beside layers comes on top of either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

from sley_core.actions.action import Kind
from sley_core.errors import PlanError
from sley_estimate.layers.operators import LayerWork, Operator
from sley_estimate.machine.tables import DeviceTable, LayerTable, MatmulTable


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one layer and one micro-batch. backward, input_gradient: with the recomputation in front of them.

    host_forward and so on: of the host to start each, where it runs ahead of the device; 0 where it does not, or is not told.
    """

    forward: float
    backward: float
    input_gradient: float
    weight_gradient: float
    host_forward: float = 0.0
    host_backward: float = 0.0
    host_input_gradient: float = 0.0
    host_weight_gradient: float = 0.0

    @classmethod
    def measured(cls, table: LayerTable) -> LayerSeconds:
        """Returns what a machine file says of a layer."""
        return cls(**{one.name: getattr(table, one.name) for one in fields(cls)})

    @classmethod
    def computed(cls, work: LayerWork, device: DeviceTable, *, starts: bool = False) -> LayerSeconds:
        """Returns the seconds of a layer's operators on `device`; recomputation counts in front of each kind of backward.

        starts: whether to tell what the host takes to start them, too, where it runs ahead. Raises PlanError "machine-matmul"
        for a product of a dtype of which the machine file says nothing.
        """
        found = cls._priced(work, lambda operators: seconds_of(operators, device))
        if not starts or device.kind == "cpu":
            return found
        hosts = (device.launch_s * len(operators) for operators in _each(work))
        return replace(found, **dict(zip(HOST_NAMES.values(), hosts, strict=True)))

    @classmethod
    def _priced(cls, work: LayerWork, price: Callable[[Sequence[Operator]], float]) -> LayerSeconds:
        again = price(work.recompute)
        return cls(
            price(work.forward), again + price(work.backward), again + price(work.input_gradient), price(work.weight_gradient)
        )

    @classmethod
    def in_proportion(cls, work: LayerWork, there: LayerWork, measured: LayerSeconds, device: DeviceTable) -> LayerSeconds:
        """Returns the seconds of a layer in proportion to a measured one: what its operators count, times measured over counted
        seconds of a layer that does the work `there` and took `measured`. Each phase has its own ratio; but recomputation that
        `there` lacks has that of the forward.

        Raises PlanError "machine-matmul" for a product of a dtype of which the machine file says nothing.
        """
        price = partial(device_seconds_of if measured.host_forward else seconds_of, device=device)
        beside, counted = cls._priced(there, price), cls._priced(work, price)
        forward = _ratio(measured.forward, beside.forward)
        again_s = price(work.recompute)

        def back(kind: Kind) -> float:
            ratio = _ratio(measured.of(kind), beside.of(kind))
            again = ratio if there.recompute else forward
            return again_s * again + (counted.of(kind) - again_s) * ratio

        return cls(
            counted.forward * forward,
            back(Kind.BACKWARD),
            back(Kind.INPUT_GRADIENT),
            counted.weight_gradient * _ratio(measured.weight_gradient, beside.weight_gradient),
            *(
                measured.host_of(kind) * _ratio(len(own), len(others))
                for kind, own, others in zip(KINDS, _each(work), _each(there), strict=True)
            ),
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

    def host_of(self, kind: Kind) -> float:
        """Returns the seconds of the host to start the layer's part of an action of `kind`; 0 as `of` does."""
        return getattr(self, HOST_NAMES[kind]) if kind in HOST_NAMES else 0.0

    @property
    def host_ways_s(self) -> tuple[float, float]:
        """Returns the seconds of the host to start the forward and the way back: whole, and in two halves."""
        halves_s = self.host_input_gradient + self.host_weight_gradient
        return self.host_forward + self.host_backward, self.host_forward + halves_s


KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
"""The actions of which a layer has seconds, in the order in which it has them."""

HOST_NAMES = dict(zip(KINDS, ("host_forward", "host_backward", "host_input_gradient", "host_weight_gradient"), strict=True))
"""Where a layer has the host's seconds of each."""


def _each(work: LayerWork) -> tuple[tuple[Operator, ...], ...]:
    """Returns the operators of each of `KINDS`, recomputation included."""
    again = work.recompute
    return work.forward, again + work.backward, again + work.input_gradient, work.weight_gradient


def _ratio(measured: float, counted: float) -> float:
    """Returns measured over counted; 1 where nothing was counted that could grow."""
    return measured / counted if counted > 0 else 1.0


def seconds_of(operators: Sequence[Operator], device: DeviceTable) -> float:
    """Returns the seconds of operators that follow each other: on CUDA the longer of the host's starts and the device's work,
    on a CPU both.

    Raises PlanError "machine-matmul" for a product of a dtype of which the machine file says nothing.
    """
    host_s, device_s = device.launch_s * len(operators), device_seconds_of(operators, device)
    return max(host_s, device_s) if device.kind == "cuda" else host_s + device_s


def device_seconds_of(operators: Sequence[Operator], device: DeviceTable) -> float:
    """Returns the seconds of operators that follow each other, whatever the host takes to start them. Raises as
    `seconds_of`.
    """
    return sum(_alone(operator, device) for operator in operators)


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
        raise PlanError("machine-matmul", message, hint="`train-cli calibrate` measures every dtype that the device has")
    return max(memory_s, (operator.flops + found.half_flops) / found.flops_per_s)

"""Computes the seconds of layers on a machine: measured, in proportion to a measured variant, or counted from operators.

An operator takes the maximum of its products and its memory traffic. On a CPU its launch time is added. On a GPU the host
launches kernels ahead of the device. For a measured layer both times are known, and a step takes the maximum of device and
host. A counted layer takes the maximum of both in each phase.

Variants of a layer that were not measured are counted and scaled by measured / counted of the measured variant. Otherwise the
order of policies and sizes would depend on the measured one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from itertools import product
from typing import Literal

from sley_core.actions.action import Kind
from sley_core.data.dataset import AnyDataset
from sley_core.errors import PlanError, SleyError
from sley_core.model.layers import Model
from sley_core.plan.plan import Plan
from sley_estimate.layers.operators import LayerWork, Operator
from sley_estimate.layers.variants import LayerVariants, Variant
from sley_estimate.machine import DeviceTable, LayerTable, MachineFile, MatmulTable
from sley_estimate.search.layouts import Choices, list_choices

Source = Literal["measured", "in proportion", "counted"]
"""The source of a layer's seconds: the machine file, another variant there after scaling, or only counting."""

ACTION_TYPES = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
"""The types of actions with layer seconds, in the order of the fields of `LayerSeconds`."""


@dataclass(frozen=True)
class LayerSeconds:
    """The seconds of a layer on one microbatch, with recomputation. host_*: the host's seconds to launch each phase, or 0 if
    the host does not run ahead.
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
    def from_table(cls, table: LayerTable) -> LayerSeconds:
        return cls(**{field.name: getattr(table, field.name) for field in fields(cls)})

    @classmethod
    def from_operators(cls, work: LayerWork, device: DeviceTable, *, with_host: bool = False) -> LayerSeconds:
        """Returns the seconds of a layer's operators on `device`. with_host: also sets the host's seconds on a GPU. Raises
        PlanError "machine-matmul" for a product in a dtype that the machine file does not list.
        """
        seconds = _price_work(work, lambda operators: operators_s(operators, device))
        if not with_host or device.kind == "cpu":
            return seconds
        names = (f"host_{field.name}" for field in fields(cls)[: len(ACTION_TYPES)])
        return replace(
            seconds,
            **{
                name: device.launch_s * len(operators)
                for name, operators in zip(names, _operators_by_action(work), strict=True)
            },
        )

    @classmethod
    def scaled(cls, work: LayerWork, baseline: LayerWork, measured: LayerSeconds, device: DeviceTable) -> LayerSeconds:
        """Returns the counted seconds of `work`, scaled by measured / counted of another variant with the work `baseline` and
        the seconds `measured`.

        Each phase has its own ratio. If `baseline` has no recomputation, the ratio of the forward is used for it. The host's
        seconds are proportional to the number of operators. Raises PlanError "machine-matmul".
        """
        price = partial(device_operators_s if measured.host_forward else operators_s, device=device)
        baseline_counted, counted = _price_work(baseline, price), _price_work(work, price)
        forward = _ratio(measured.forward, baseline_counted.forward)
        recompute_s = price(work.recompute)

        def backward_s(action_type: Kind) -> float:
            ratio = _ratio(measured.action_s(action_type), baseline_counted.action_s(action_type))
            return (
                recompute_s * (ratio if baseline.recompute else forward) + (counted.action_s(action_type) - recompute_s) * ratio
            )

        return cls(
            counted.forward * forward,
            backward_s(Kind.BACKWARD),
            backward_s(Kind.INPUT_GRADIENT),
            counted.weight_gradient * _ratio(measured.weight_gradient, baseline_counted.weight_gradient),
            *(
                measured.host_action_s(action_type) * _ratio(len(operators), len(baseline_operators))
                for action_type, operators, baseline_operators in zip(
                    ACTION_TYPES, _operators_by_action(work), _operators_by_action(baseline), strict=True
                )
            ),
        )

    def action_s(self, action_type: Kind) -> float:
        """Returns the seconds of the layer in an action of `action_type`."""
        return self._values[ACTION_TYPES.index(action_type)] if action_type in ACTION_TYPES else 0.0

    def host_action_s(self, action_type: Kind) -> float:
        """Returns the host's seconds to launch the layer in an action of `action_type`."""
        return self._values[len(ACTION_TYPES) + ACTION_TYPES.index(action_type)] if action_type in ACTION_TYPES else 0.0

    @property
    def total_s(self) -> float:
        """Returns the seconds of forward and backward, each the maximum of device and host."""
        return max(self.forward, self.host_forward) + max(self.backward, self.host_backward)

    @property
    def _values(self) -> list[float]:
        return [getattr(self, field.name) for field in fields(self)]


def _price_work(work: LayerWork, price: Callable[[Sequence[Operator]], float]) -> LayerSeconds:
    recompute = price(work.recompute)
    return LayerSeconds(
        price(work.forward),
        recompute + price(work.backward),
        recompute + price(work.input_gradient),
        price(work.weight_gradient),
    )


def _operators_by_action(work: LayerWork) -> tuple[tuple[Operator, ...], ...]:
    """Returns the operators of each of `ACTION_TYPES`, with recomputation."""
    recompute = work.recompute
    return work.forward, recompute + work.backward, recompute + work.input_gradient, work.weight_gradient


def _ratio(measured: float, counted: float) -> float:
    return measured / counted if counted > 0 else 1.0


def operators_s(operators: Sequence[Operator], device: DeviceTable) -> float:
    """Returns the seconds of operators: on CUDA the maximum of launches and work, on a CPU their sum. Raises PlanError
    "machine-matmul".
    """
    host_s, device_s = device.launch_s * len(operators), device_operators_s(operators, device)
    return max(host_s, device_s) if device.kind == "cuda" else host_s + device_s


def device_operators_s(operators: Sequence[Operator], device: DeviceTable) -> float:
    """Returns the device seconds of consecutive operators without launches. Raises the errors of `operators_s`."""
    total_s = 0.0
    for operator in operators:
        seconds = operator.num_bytes / device.memory_bandwidth
        if operator.flops:
            table: MatmulTable | None = getattr(device.matmul, operator.dtype)
            if table is None:
                missing = f"`[device.matmul.{operator.dtype}]`, but a layer multiplies in {operator.dtype}"
                hint = "use `train-cli calibrate` to measure every dtype of the device"
                raise PlanError("machine-matmul", f"the machine `{device.name}` has no {missing}", hint=hint)
            seconds = max(seconds, (operator.flops + table.half_flops) / table.flops_per_s)
        total_s += seconds
    return total_s


@dataclass(frozen=True, eq=False)
class MeasuredVariant:
    """The measured seconds of a layer in `variant`, from the machine file."""

    variant: Variant
    seconds: LayerSeconds


class ScaledLayers:
    """Prices layers of `variants` from the measured layers in `machine`, which have whole sequences. choices: the policies of
    possible measurements.
    """

    def __init__(self, variants: LayerVariants, machine: MachineFile, choices: Choices) -> None:
        self.variants = variants
        self.machine = machine
        self.policies = choices.policies
        self._measured_seconds = {table.key: LayerSeconds.from_table(table) for table in machine.layers}

    def price(self, variant: Variant) -> list[tuple[LayerSeconds, Source]]:
        """Returns the seconds of each layer in `variant`, without exchanges of slices, and their source.

        Raises the errors of `LayerVariants.works` unless all layers were measured, and PlanError "machine-matmul".
        """
        measured_seconds = self._measured_seconds
        keys = self.variants.keys(variant) if measured_seconds and variant.sp == 1 else [""] * len(self.variants.model.layers)
        if measured_seconds.keys() >= set(keys):
            return [(measured_seconds[key], "measured") for key in keys]
        priced: dict[tuple[int, str, MeasuredVariant | None], tuple[LayerSeconds, Source]] = {}
        result = []
        works = self.variants.works(variant)
        for index, (work, key, measured) in enumerate(zip(works, keys, self._measured_variants, strict=True)):
            price_key = id(work), key, measured  # equal layers share one object
            if price_key not in priced:
                priced[price_key] = self._price_layer(index, work, key, measured)
            result.append(priced[price_key])
        return result

    def _price_layer(
        self, index: int, work: LayerWork, key: str, measured: MeasuredVariant | None
    ) -> tuple[LayerSeconds, Source]:
        if key in self._measured_seconds:
            return self._measured_seconds[key], "measured"
        if measured is not None:
            with suppress(SleyError):  # the measured variant may not be countable
                baseline_work = self.variants.works(measured.variant)[index]
                return LayerSeconds.scaled(work, baseline_work, measured.seconds, self.machine.device), "in proportion"
        return LayerSeconds.from_operators(work, self.machine.device, with_host=self.machine.engine is not None), "counted"

    @cached_property
    def _measured_variants(self) -> list[MeasuredVariant | None]:
        """Returns the measured variant of each layer; equal layers share one. Policies that copy are priced separately."""
        measured: list[MeasuredVariant | None] = [None] * len(self.variants.model.layers)
        sizes = {self.variants.plan.batch.micro_size, *(table.micro_size for table in self.machine.layers if table.micro_size)}
        shared: dict[str, MeasuredVariant] = {}
        for policy, micro_size in product([policy for policy in self.policies if not policy.copies], sorted(sizes)):
            variant = Variant(policy, micro_size)
            try:
                keys = self.variants.keys(variant) if self._measured_seconds else []
            except SleyError:  # a policy that cannot be built was not measured
                continue
            for index, key in enumerate(keys):
                if measured[index] is None and key in self._measured_seconds:
                    measured[index] = shared.setdefault(key, MeasuredVariant(variant, self._measured_seconds[key]))
        return measured


@dataclass(frozen=True)
class PricedLayer:
    """The seconds of a layer without exchanges of slices, and their source; None if its recorded operators are priced."""

    name: str
    seconds: LayerSeconds | None
    source: Source


def price_layers(plan: Plan, model: Model, dataset: AnyDataset, machine: MachineFile) -> list[PricedLayer]:
    """Returns every layer of `model`, on meta, with its seconds if they follow from the measured layers of `machine`."""
    priced: Sequence[tuple[LayerSeconds, Source] | None] = [None] * len(model.layers)
    if machine.layers:
        choices = list_choices(plan)
        with suppress(SleyError):  # some layer cannot be counted
            scaled = ScaledLayers(LayerVariants(plan, model, dataset), machine, choices)
            priced = scaled.price(Variant(choices.policies[0], plan.batch.micro_size, plan.parallel.sp))
    return [
        PricedLayer(layer.name, None, "counted") if pair is None or pair[1] == "counted" else PricedLayer(layer.name, *pair)
        for layer, pair in zip(model.layers, priced, strict=True)
    ]

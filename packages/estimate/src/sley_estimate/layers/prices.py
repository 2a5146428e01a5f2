"""Seconds of layers on a machine: measured, in proportion to a measured variant, or counted from operators.

An operator takes the longer of its products and its memory traffic. On a CPU the time to start it is added. On a GPU the host
starts kernels ahead of the device: of a measured layer both are known, and a step takes the longer of device and host; a layer
that is counted takes the longer of both in each phase.

Where only some variants of a layer were measured, the others are counted and scaled by measured / counted of the nearest one.
Else policies and sizes would be ordered by which of them was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from itertools import product
from math import log2
from typing import Literal

from torch import Tensor

from sley_core.actions.action import Kind
from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_core.errors import PlanError, SleyError
from sley_core.model.layers import Model
from sley_core.plan.plan import Component, Plan
from sley_estimate.layers.operators import LayerWork, Operator
from sley_estimate.layers.trace import layer_works
from sley_estimate.layers.variants import LayerVariants, Variant, layer_keys
from sley_estimate.machine import DeviceTable, LayerTable, MachineFile, MatmulTable
from sley_estimate.search.layouts import Choice, Choices, choices_of

Source = Literal["measured", "in proportion", "counted"]
"""Whether the seconds of a layer are in the machine file, scaled from another variant there, or counted alone."""

KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
"""The actions of which a layer has seconds, in the order of its fields."""


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of a layer and micro-batch, recomputation included. host_*: to start each; 0 if it does not run ahead."""

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
        return cls(**{field.name: getattr(table, field.name) for field in fields(cls)})

    @classmethod
    def counted(cls, work: LayerWork, device: DeviceTable, *, with_host: bool = False) -> LayerSeconds:
        """Returns the seconds of a layer's operators on `device`. with_host: fills the host's seconds too, on a GPU. Raises
        PlanError "machine-matmul" for a product of a dtype that the machine file does not have.
        """
        seconds = _priced(work, lambda operators: seconds_of(operators, device))
        if not with_host or device.kind == "cpu":
            return seconds
        names = (f"host_{field.name}" for field in fields(cls)[: len(KINDS)])
        return replace(seconds, **{name: device.launch_s * len(each) for name, each in zip(names, _by_kind(work), strict=True)})

    @classmethod
    def in_proportion(cls, work: LayerWork, other: LayerWork, measured: LayerSeconds, device: DeviceTable) -> LayerSeconds:
        """Returns counted seconds of `work` times measured / counted of a variant that does `other` and took `measured`.

        Each phase has its own ratio; recomputation that `other` lacks has the forward's. The host's seconds go by the number of
        operators. Raises PlanError "machine-matmul".
        """
        price = partial(device_seconds_of if measured.host_forward else seconds_of, device=device)
        of_other, counted = _priced(other, price), _priced(work, price)
        forward = _ratio(measured.forward, of_other.forward)
        again_s = price(work.recompute)

        def back(kind: Kind) -> float:
            ratio = _ratio(measured.of(kind), of_other.of(kind))
            return again_s * (ratio if other.recompute else forward) + (counted.of(kind) - again_s) * ratio

        return cls(
            counted.forward * forward,
            back(Kind.BACKWARD),
            back(Kind.INPUT_GRADIENT),
            counted.weight_gradient * _ratio(measured.weight_gradient, of_other.weight_gradient),
            *(
                measured.host_of(kind) * _ratio(len(own), len(others))
                for kind, own, others in zip(KINDS, _by_kind(work), _by_kind(other), strict=True)
            ),
        )

    def of(self, kind: Kind) -> float:
        """Returns the seconds that the layer adds to an action of `kind`."""
        return self._values[KINDS.index(kind)] if kind in KINDS else 0.0

    def host_of(self, kind: Kind) -> float:
        """Returns the host's seconds to start the layer's part of an action of `kind`."""
        return self._values[len(KINDS) + KINDS.index(kind)] if kind in KINDS else 0.0

    @property
    def whole_s(self) -> float:
        """Returns the seconds of forward and backward, each of the slower of device and host."""
        return max(self.forward, self.host_forward) + max(self.backward, self.host_backward)

    @property
    def _values(self) -> list[float]:
        return [getattr(self, field.name) for field in fields(self)]


def _priced(work: LayerWork, price: Callable[[Sequence[Operator]], float]) -> LayerSeconds:
    again = price(work.recompute)
    return LayerSeconds(
        price(work.forward), again + price(work.backward), again + price(work.input_gradient), price(work.weight_gradient)
    )


def _by_kind(work: LayerWork) -> tuple[tuple[Operator, ...], ...]:
    """Returns the operators of each of `KINDS`, recomputation included."""
    again = work.recompute
    return work.forward, again + work.backward, again + work.input_gradient, work.weight_gradient


def _ratio(measured: float, counted: float) -> float:
    return measured / counted if counted > 0 else 1.0


def seconds_of(operators: Sequence[Operator], device: DeviceTable) -> float:
    """Returns the seconds of operators: on CUDA the longer of starts and work, on a CPU their sum. Raises "machine-matmul"."""
    host_s, device_s = device.launch_s * len(operators), device_seconds_of(operators, device)
    return max(host_s, device_s) if device.kind == "cuda" else host_s + device_s


def device_seconds_of(operators: Sequence[Operator], device: DeviceTable) -> float:
    """Returns the seconds of consecutive operators without the host's starts. Raises as `seconds_of`."""
    total_s = 0.0
    for operator in operators:
        seconds = operator.num_bytes / device.memory_bandwidth
        if operator.flops:
            table: MatmulTable | None = getattr(device.matmul, operator.dtype)
            if table is None:
                what = f"`[device.matmul.{operator.dtype}]`, and a layer multiplies {operator.dtype}"
                hint = "`train-cli calibrate` measures every dtype that the device has"
                raise PlanError("machine-matmul", f"the machine `{device.name}` has no {what}", hint=hint)
            seconds = max(seconds, (operator.flops + table.half_flops) / table.flops_per_s)
        total_s += seconds
    return total_s


@dataclass(frozen=True, eq=False)
class MeasuredVariant:
    """A layer took `seconds` as `variant`, by the machine file."""

    variant: Variant
    seconds: LayerSeconds


class NearestLayers:
    """Prices layers of `variants` by those in `machine`. choices: policies and attentions under which they may be there."""

    def __init__(self, variants: LayerVariants, machine: MachineFile, choices: Choices) -> None:
        self.variants = variants
        self.machine = machine
        self.policies = choices.policies
        self.attention: Choice | Component | None = choices.attention[0] if choices.attention else None
        self._known = {table.key: LayerSeconds.measured(table) for table in machine.layers}

    def priced(
        self, variant: Variant, works: Sequence[LayerWork], attention: Choice | Component | None = None
    ) -> list[tuple[LayerSeconds, Source]]:
        """Returns the seconds of each layer in `variant`, without exchanges of slices, and their source.

        works: of the layers in this variant; one object for equal layers. attention: needed where a sequence is cut. Raises
        PlanError "machine-matmul".
        """
        keys = self.variants.keys(variant, attention) if self._known else [""] * len(works)
        priced: dict[tuple[int, str, MeasuredVariant | None], tuple[LayerSeconds, Source]] = {}
        result = []
        for at, (work, key, nearest) in enumerate(zip(works, keys, self._nearest(variant), strict=True)):
            place = id(work), key, nearest
            if place not in priced:
                priced[place] = self._price(at, work, key, nearest)
            result.append(priced[place])
        return result

    def _price(self, at: int, work: LayerWork, key: str, nearest: MeasuredVariant | None) -> tuple[LayerSeconds, Source]:
        if key in self._known:
            return self._known[key], "measured"
        if nearest is not None:
            with suppress(SleyError):  # the measured variant may not be countable
                other = self.variants.works(nearest.variant)[at]
                return LayerSeconds.in_proportion(work, other, nearest.seconds, self.machine.device), "in proportion"
        return LayerSeconds.counted(work, self.machine.device, with_host=self.machine.engine is not None), "counted"

    def _nearest(self, variant: Variant) -> list[MeasuredVariant | None]:
        """Returns for each layer its nearest measured variant: by samples, then by slices, then by policy."""

        def distance(measured: MeasuredVariant) -> tuple[float, bool, bool]:
            other = measured.variant
            samples = abs(log2(other.samples / variant.samples))
            return samples, other.sp != variant.sp, str(other.policy) != str(variant.policy)

        nearest = {each: min(each, key=distance, default=None) for each in set(self._measured)}
        return [nearest[each] for each in self._measured]

    @cached_property
    def _measured(self) -> list[tuple[MeasuredVariant, ...]]:
        """Returns for each layer its variants in the machine file; equal for equal layers. Policies that copy are priced by
        themselves.
        """
        if not self._known:
            return [()] * len(self.variants.model.layers)
        plan, tables = self.variants.plan, self.machine.layers
        sizes = {plan.batch.micro_size, *(table.micro_size for table in tables if table.micro_size)}
        slices = {1, plan.parallel.sp, *(table.sp for table in tables)} if self.attention else {1}
        policies = [policy for policy in self.policies if not policy.copies]
        by_layer: list[dict[str, MeasuredVariant]] = [{} for _ in self.variants.model.layers]
        shared: dict[str, MeasuredVariant] = {}
        for parts in product(policies, sorted(sizes), sorted(slices)):
            variant = Variant(*parts)
            try:
                keys = self.variants.keys(variant, self.attention)
            except SleyError:  # a policy that cannot be built here was not measured
                continue
            for known, key in zip(by_layer, keys, strict=True):
                if key in self._known:
                    known.setdefault(key, shared.setdefault(key, MeasuredVariant(variant, self._known[key])))
        return [tuple(known.values()) for known in by_layer]


@dataclass(frozen=True)
class PricedLayer:
    """A layer's seconds and their source, and the bytes of its output. key: of equal layers."""

    name: str
    key: str
    seconds: LayerSeconds
    output_bytes: int
    source: Source


def priced_layers(plan: Plan, model: Model, fields: Mapping[str, Tensor], machine: MachineFile) -> list[PricedLayer] | None:
    """Returns every layer of `model`, on meta, in order, with its seconds, without exchanges of slices. None for a plan with
    slices where no layer was measured or some cannot be counted: they are priced by their recorded operators.

    fields: a micro-batch, of slices the first, on meta. Raises PlanError "estimate-layer" for a layer that was not measured and
    cannot be counted, "machine-matmul".
    """
    policy = plan.activations.build([layer.name for layer in model.layers])
    keys = layer_keys(plan, model, policy, fields)
    known = {table.key: table for table in machine.layers}
    if known.keys() >= set(keys):
        return [
            PricedLayer(layer.name, key, LayerSeconds.measured(known[key]), known[key].output_bytes, "measured")
            for layer, key in zip(model.layers, keys, strict=True)
        ]
    is_sliced = plan.parallel.sp > 1
    if is_sliced and not machine.layers:
        return None
    works = [] if is_sliced else layer_works(plan, model, fields, keys)
    if not machine.layers:
        seconds = (LayerSeconds.counted(work, machine.device, with_host=machine.engine is not None) for work in works)
        priced: list[tuple[LayerSeconds, Source]] = [(each, "counted") for each in seconds]
    else:
        choices = choices_of(plan)
        dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
        nearest = NearestLayers(LayerVariants(plan, model, dataset), machine, choices)
        variant = Variant(choices.policies[0], plan.batch.micro_size, plan.parallel.sp)
        if is_sliced:
            try:
                works = nearest.variants.works(variant)
            except SleyError:
                return None
        priced = nearest.priced(variant, works, plan.sequence)
        if is_sliced and all(source == "counted" for _, source in priced):
            return None
    return [
        PricedLayer(layer.name, key, seconds, work.output_bytes, source)
        for layer, key, work, (seconds, source) in zip(model.layers, keys, works, priced, strict=True)
    ]

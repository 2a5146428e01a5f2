"""Computes the times of layers on a machine: measured, in proportion to a measured variant, or counted from their operators.

An operator takes as long as its matrix product or its memory traffic, whichever is longer. On a CPU its launch time is added.
On a GPU the host launches kernels ahead of the device. For measured layers the times of device and host are known, and a step
takes as long as the slower of the two. In a counted layer, each phase takes as long as the slower of the two.

If only another variant of a layer (another policy or number of samples) was measured, the layer takes its counted time times
the ratio of measured to counted time of that variant. Without this factor, measured and counted variants could not be compared.

Each policy is traced on one sample and on two. Bytes and FLOPs are linear in the number of samples, so two traces determine the
work on any number of samples. A slice of a sequence over n ranks counts as 1/n of a sample: 1/n of its positions, or of its
heads in attention.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial, wraps
from itertools import product
from typing import Any, Literal, ParamSpec, TypeVar

from sley_core.actions.action import Kind
from sley_core.data.dataset import AnyDataset
from sley_core.errors import KeyPath, PlanError, SleyError
from sley_core.model.layers import Model
from sley_core.plan.load import replace_values
from sley_core.plan.plan import Plan
from sley_core.protocols import ActivationPolicy
from sley_estimate.layers.operators import PHASES, LayerWork, Operator
from sley_estimate.layers.trace import TracedLayers, layer_keys, trace_layers
from sley_estimate.machine import DeviceTable, MachineFile, MatmulTable, missing_host_error
from sley_estimate.search.layouts import Choice, list_choices
from train_cli.meta_model import meta_micro_batch

Source = Literal["measured", "in proportion", "counted"]
"""The source of a layer's times: the machine file, another variant of the layer there, or only its operators."""


@dataclass(frozen=True)
class LayerSeconds:
    """The times of a layer on one microbatch in seconds. The backward includes recomputation. input_gradient, weight_gradient:
    the first and the second half of a split backward; 0 if they were not measured. host_*: the time that the host needs to
    launch each part; 0 if the host does not run ahead of the device.
    """

    forward: float
    backward: float
    input_gradient: float = 0.0
    weight_gradient: float = 0.0
    host_forward: float = 0.0
    host_backward: float = 0.0
    host_input_gradient: float = 0.0
    host_weight_gradient: float = 0.0

    @classmethod
    def from_operators(cls, work: LayerWork, device: DeviceTable, *, with_host: bool = False) -> "LayerSeconds":
        """Returns the times of a layer's operators on `device`. with_host: whether to also set the host's times if `device` is
        a GPU. Raises the errors of `operators_s`.
        """
        backward = operators_s(work.recompute, device) + operators_s(work.backward, device)
        seconds = cls(operators_s(work.forward, device), backward)
        if not with_host or device.kind == "cpu":
            return seconds
        forward_count, backward_count = len(work.forward), len(work.recompute) + len(work.backward)
        return replace(seconds, host_forward=device.launch_s * forward_count, host_backward=device.launch_s * backward_count)

    @classmethod
    def from_variant(
        cls, work: LayerWork, baseline: LayerWork, measured: "LayerSeconds", device: DeviceTable
    ) -> "LayerSeconds":
        """Returns the counted times of `work`, multiplied by the ratio of measured to counted times of another variant of the
        layer. baseline, measured: the work and the measured times of this other variant. Forward and backward have separate
        ratios. Recomputation in `work` has the ratio of the forward if `baseline` has none. The second half of a split backward
        is proportional to the backward without recomputation, and the first half has the rest. The host's times are
        proportional to the number of operators. Raises the errors of `operators_s`.
        """
        seconds_of = partial(device_operators_s if measured.host_forward else operators_s, device=device)
        recompute_s, backward_s = seconds_of(work.recompute), seconds_of(work.backward)
        baseline_recompute_s, baseline_backward_s = seconds_of(baseline.recompute), seconds_of(baseline.backward)
        forward_ratio = _ratio(measured.forward, seconds_of(baseline.forward))
        ratio = _ratio(measured.backward, baseline_recompute_s + baseline_backward_s)
        backward = recompute_s * (ratio if baseline.recompute else forward_ratio) + backward_s * ratio
        growth = _ratio(backward_s, baseline_backward_s)
        host_growth = _ratio(len(work.recompute) + len(work.backward), len(baseline.recompute) + len(baseline.backward))
        return cls(
            seconds_of(work.forward) * forward_ratio,
            backward,
            max(0.0, backward + growth * (measured.input_gradient - measured.backward)),
            growth * measured.weight_gradient,
            measured.host_forward * _ratio(len(work.forward), len(baseline.forward)),
            measured.host_backward * host_growth,
            measured.host_input_gradient * host_growth,
            measured.host_weight_gradient * host_growth,
        )

    def action_s(self, action_type: Kind) -> float:
        """Returns the time in seconds of the layer on the device in an action of kind `action_type`."""
        return float(getattr(self, action_type.name.lower()))

    def host_action_s(self, action_type: Kind) -> float:
        """Returns the time in seconds that the host needs to launch the layer in an action of kind `action_type`."""
        return float(getattr(self, f"host_{action_type.name.lower()}"))

    @property
    def total_s(self) -> float:
        """Returns the time in seconds of the forward plus the backward. In each, the slower of device and host counts."""
        return max(self.forward, self.host_forward) + max(self.backward, self.host_backward)


def _ratio(measured: float, counted: float) -> float:
    """Returns `measured` / `counted`, or 1 if `counted` is 0."""
    return measured / counted if counted > 0 else 1.0


def operators_s(operators: Sequence[Operator], device: DeviceTable) -> float:
    """Returns the time in seconds of consecutive operators: on a CPU, the sum of launches and work; on CUDA, the longer of the
    two. Raises PlanError "machine-matmul" for a matrix product in a dtype that the machine file does not list.
    """
    host_s, device_s = device.launch_s * len(operators), device_operators_s(operators, device)
    return max(host_s, device_s) if device.kind == "cuda" else host_s + device_s


def host_operators_s(operators: Sequence[Operator], machine: MachineFile) -> float:
    """Returns the time in seconds of operators on the host's cores. For a GPU machine, the time follows from the host's
    memory bandwidth. Raises PlanError "machine-host" if the machine file of a GPU does not have this bandwidth.
    """
    if machine.device.kind == "cpu":
        return operators_s(operators, machine.device)
    if machine.host is None or machine.host.memory_bandwidth is None:
        raise missing_host_error("[host] memory_bandwidth", "the optimizer runs on the host")
    return sum(operator.num_bytes for operator in operators) / machine.host.memory_bandwidth


def device_operators_s(operators: Sequence[Operator], device: DeviceTable) -> float:
    """Returns the time in seconds of consecutive operators without their launches. Raises the errors of `operators_s`."""
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


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def memoize(method: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Returns `method` with a cache in the object that it belongs to. If an earlier call had the same arguments, the call
    returns the cached result, or raises the cached SleyError. The arguments must be hashable and positional.
    """

    @wraps(method)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        assert not kwargs, kwargs
        results: dict[Hashable, Result | SleyError] = vars(args[0]).setdefault("_results", {})
        key = method.__name__, *args[1:]
        if key not in results:
            try:
                results[key] = method(*args, **kwargs)
            except SleyError as error:
                results[key] = error
        result = results[key]
        if isinstance(result, SleyError):
            raise result.with_traceback(None)
        return result

    return call


@dataclass(frozen=True)
class Variant:
    """The conditions under which layers run: policy, samples per microbatch, and the number of ranks per sequence (`sp`)."""

    policy: Choice
    micro_size: int
    sp: int = 1


@dataclass(frozen=True, eq=False)
class MeasuredVariant:
    """The measured times of a layer in `variant`. index: the index in the model of the first layer with the same key."""

    variant: Variant
    index: int
    seconds: LayerSeconds


@dataclass(eq=False)
class LayerTimes:
    """Computes the times of the layers of `model`, which is on meta, in any variant. Traces the layers under an activation
    policy when the policy is first used. policies: the policies under which the layers in `machine` may have been measured,
    always with whole sequences.
    """

    plan: Plan
    model: Model
    dataset: AnyDataset
    machine: MachineFile
    policies: Sequence[Choice]
    _traced: TracedLayers = field(default_factory=dict)

    @cached_property
    def _measured_seconds(self) -> dict[str, LayerSeconds]:
        names = [entry.name for entry in fields(LayerSeconds)]
        return {table.key: LayerSeconds(*(getattr(table, name) for name in names)) for table in self.machine.layers}

    @memoize
    def policy(self, choice: Choice) -> ActivationPolicy:
        """Returns the activation policy of `choice` for the model's layers. Raises PlanError if the policy cannot be built."""
        policy: ActivationPolicy = self._plan_variant(choice, 1).activations.build([layer.name for layer in self.model.layers])
        return policy

    @memoize
    def layer_work(self, variant: Variant) -> list[LayerWork]:
        """Returns the work of each layer in `variant`, with the copies that attention over slices makes; equal layers share one
        object. Raises PlanError for a policy that cannot be built, and "estimate-layer" for a layer that cannot run on meta.
        """
        pairs = zip(self._trace_whole_samples(variant.policy, 1), self._trace_whole_samples(variant.policy, 2), strict=True)
        samples, has_slices = variant.micro_size / variant.sp, variant.sp > 1
        return [self._scaled_work(single, double, samples, has_slices) for single, double in pairs]

    def seconds(self, variant: Variant) -> list[tuple[LayerSeconds, Source]]:
        """Returns the times of each layer in `variant`, without exchanges between the ranks that split a sequence, and the
        source of the times. If a layer was not measured in this variant, may raise errors of `layer_work` and `operators_s`.
        """
        measured = self._measured_seconds
        has_keys = measured and variant.sp == 1
        keys = self._keys(variant.policy, variant.micro_size) if has_keys else [""] * len(self.model.layers)
        if measured.keys() >= set(keys):
            return [(measured[key], "measured") for key in keys]
        layers = zip(self.layer_work(variant), keys, self._measured_variants, strict=True)
        return [self._layer_seconds(work, key, measured_variant) for work, key, measured_variant in layers]

    @memoize
    def _layer_seconds(self, work: LayerWork, key: str, measured: MeasuredVariant | None) -> tuple[LayerSeconds, Source]:
        """Returns the times of a layer with this `work`, and the source of the times. key: the layer's key in the machine file;
        "" if the file cannot contain the layer. measured: a variant of the layer that the file contains; None if there is none.
        """
        if key in self._measured_seconds:
            return self._measured_seconds[key], "measured"
        if measured is not None:
            with suppress(SleyError):  # the operators of the measured variant may not be countable
                baseline = self.layer_work(measured.variant)[measured.index]
                return LayerSeconds.from_variant(work, baseline, measured.seconds, self.machine.device), "in proportion"
        return LayerSeconds.from_operators(work, self.machine.device, with_host=self.machine.engine is not None), "counted"

    @memoize
    def _scaled_work(self, single: LayerWork, double: LayerWork, samples: float, has_slices: bool) -> LayerWork:
        """Returns the result of `scale_work`, with the copies of attention over slices if `has_slices` is True."""
        work = scale_work(single, double, samples)
        return add_slice_copies(work) if has_slices else work

    @cached_property
    def _measured_variants(self) -> list[MeasuredVariant | None]:
        """Returns for each layer a variant that the machine file contains, or None. Ignores policies that offload tensors."""
        measured: list[MeasuredVariant | None] = [None] * len(self.model.layers)
        sizes = {self.plan.batch.micro_size, *(table.micro_size for table in self.machine.layers if table.micro_size)}
        shared: dict[str, MeasuredVariant] = {}
        policies = [policy for policy in self.policies if not policy.offloads_activations]
        for policy, micro_size in product(policies, sorted(sizes)):
            try:
                keys = self._keys(policy, micro_size) if self._measured_seconds else []
            except SleyError:  # a policy that cannot be built was not measured
                continue
            for index, key in enumerate(keys):
                if measured[index] is None and key in self._measured_seconds:
                    variant = MeasuredVariant(Variant(policy, micro_size), index, self._measured_seconds[key])
                    measured[index] = shared.setdefault(key, variant)
        return measured

    @memoize
    def _plan_variant(self, policy: Choice, micro_size: int) -> Plan:
        """Returns the plan with this policy, `micro_size` samples in a microbatch, and whole sequences."""
        whole: dict[KeyPath, Any] = {("activations",): policy.table, ("parallel", "sp"): 1}
        return replace_values(self.plan, {**whole, ("batch", "micro_size"): micro_size})

    @memoize
    def _keys(self, policy: Choice, micro_size: int) -> list[str]:
        """Returns the key of each layer under `policy`, with `micro_size` samples in a microbatch and whole sequences."""
        plan = self._plan_variant(policy, micro_size)
        return layer_keys(plan, self.model, self.policy(policy), meta_micro_batch(plan, self.dataset))

    @memoize
    def _trace_whole_samples(self, policy: Choice, micro_size: int) -> list[LayerWork]:
        """Returns the work of each layer under `policy` on `micro_size` whole samples."""
        plan = self._plan_variant(policy, micro_size)
        # Each trace needs new tensors, since layers cache results by tensor, such as tables of positions.
        fields = meta_micro_batch(plan, self.dataset)
        return trace_layers(plan, self.model, fields, self._keys(policy, micro_size), self._traced)


ATTENTION = "attention"  # the name of the operator that stands for an attention
NUM_ATTENTION_TENSORS = 4  # the number of tensors that attention over slices copies: q, k, v and the output
BYTES_PER_COPIED_BYTE = 3  # `describe_operator` counts each byte of a copy once for the source and twice for the target


def scale_work(single: LayerWork, double: LayerWork, samples: float) -> LayerWork:
    """Returns the work on `samples` samples, which may be a fraction, by linear extrapolation from the work on one sample and
    on two. Operators whose number differs between the two, as in a chunked loss, are proportional to their work on two samples.
    """
    return LayerWork(
        **{name: _scale_operators(getattr(single, name), getattr(double, name), samples) for name in PHASES},
        output_bytes=_extrapolate(single.output_bytes, double.output_bytes, samples),
        saved_bytes=_extrapolate(single.saved_bytes, double.saved_bytes, samples),
    )


def add_slice_copies(work: LayerWork) -> LayerWork:
    """Returns `work` with the copies of q, k, v and output that attention over slices of a sequence makes in each phase."""

    def with_copies(operators: Sequence[Operator], forward: Sequence[Operator]) -> tuple[Operator, ...]:
        """Returns `operators` followed by copies of the tensors that each attention in `forward` reads or writes."""
        sizes = [operator.num_bytes for operator in forward if operator.name == ATTENTION]
        copies = [Operator("copy", BYTES_PER_COPIED_BYTE * num_bytes // NUM_ATTENTION_TENSORS) for num_bytes in sizes]
        return (*operators, *(copy for copy in copies for _ in range(NUM_ATTENTION_TENSORS)))

    return replace(
        work,
        forward=with_copies(work.forward, work.forward),
        recompute=with_copies(work.recompute, work.recompute),
        backward=with_copies(work.backward, work.forward),
    )


def _scale_operators(single: Sequence[Operator], double: Sequence[Operator], samples: float) -> tuple[Operator, ...]:
    """Returns the operators for `samples` samples, by extrapolation from the operators for one sample and for two. Operators of
    a name that the lists contain in different numbers are proportional to the operators in `double`.
    """
    firsts: dict[str, list[Operator]] = defaultdict(list)
    for operator in single:
        firsts[operator.name].append(operator)
    counts = Counter(operator.name for operator in double)
    pairs = {name: iter(operators) for name, operators in firsts.items() if len(operators) == counts[name]}
    operators = []
    for second in double:
        first = next(pairs[second.name]) if second.name in pairs else None
        if first is None:
            sizes = round(second.num_bytes * (samples / 2)), round(second.flops * (samples / 2))
        else:
            sizes = _extrapolate(first.num_bytes, second.num_bytes, samples), _extrapolate(first.flops, second.flops, samples)
        operators.append(replace(second, num_bytes=sizes[0], flops=sizes[1]))
    return tuple(operators)


def _extrapolate(single: int, double: int, samples: float) -> int:
    """Returns the rounded value at `samples` of the line with the values `single` at 1 and `double` at 2."""
    return round(single + (double - single) * (samples - 1))


@dataclass(frozen=True)
class LayerEstimate:
    """The times of the layer `name`, without exchanges between the ranks that split a sequence, and the source of these times.
    seconds: None if the source is "counted".
    """

    name: str
    seconds: LayerSeconds | None
    source: Source


def estimate_layers(plan: Plan, model: Model, dataset: AnyDataset, machine: MachineFile) -> list[LayerEstimate]:
    """Returns an estimate of each layer of `model`, which is on meta, from the layers that were measured in `machine`."""
    estimates: Sequence[tuple[LayerSeconds, Source] | None] = [None] * len(model.layers)
    if machine.layers:
        policies = list_choices(plan).policies
        with suppress(SleyError):  # if the operators of one layer cannot be counted, no layer gets times
            variant = Variant(policies[0], plan.batch.micro_size, plan.parallel.sp)
            estimates = LayerTimes(plan, model, dataset, machine, policies).seconds(variant)
    return [
        LayerEstimate(layer.name, None, "counted") if pair is None or pair[1] == "counted" else LayerEstimate(layer.name, *pair)
        for layer, pair in zip(model.layers, estimates, strict=True)
    ]

"""Computes keys and work of a plan's layers in any variant: another activation policy, other microbatches, slices.

A policy is traced on one sample and on two. Shapes, bytes and FLOPs are linear in the number of samples except for weights, so
the two traces determine the work on any number. A slice of a sequence over n ranks is 1/n of a sample: 1/n of its positions, or
of its heads in attention.

Layers with equal keys need equal time and memory: they have one class and equal settings and shapes. An attribute that is not
plain (a number, a text, a tensor shape) makes the key of its layer unique. That layer is counted separately, which is slower
and never wrong.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from sley_core.engine.call import Keep
from sley_core.errors import SleyError
from sley_core.plan import document
from sley_core.plan.load import resolve_plan
from sley_estimate.layers.operators import PHASES, LayerWork, Operator
from sley_estimate.layers.trace import Traced, layer_works
from train_cli.meta_model import meta_micro_batch

if TYPE_CHECKING:
    from sley_core.data.dataset import AnyDataset
    from sley_core.model.layers import Layer, Model
    from sley_core.plan.plan import Plan
    from sley_core.protocols import ActivationPolicy
    from sley_estimate.search.layouts import Choice

PLAIN = (str, int, float, bool, bytes, type(None), torch.dtype, torch.device, torch.Size, Enum)
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


def module_signature(module: nn.Module, location: str) -> Any:
    """Returns nested plain values that determine the module's cost: modules whose signatures have equal `repr`s cost the same.

    location: the module's name in the model, which replaces attributes that are not plain.
    """
    attributes = [
        (name, plain_value(value, f"{location}.{name}"))
        for name, value in sorted(vars(module).items())
        if name not in MODULE_ATTRIBUTES or name == "training"
    ]
    tensors = [
        (name, None if value is None else (tuple(value.shape), str(value.dtype), value.requires_grad))
        for registered in (module._parameters, module._buffers)
        for name, value in registered.items()
    ]
    hooks = [(name, location) for name in MODULE_ATTRIBUTES if name.endswith("hooks") and vars(module)[name]]
    inner = [(name, child and module_signature(child, f"{location}.{name}")) for name, child in module._modules.items()]
    local = (
        location if "<" in type(module).__qualname__ else ""
    )  # a class defined in a function depends on the function's arguments
    return type(module).__module__, type(module).__qualname__, local, attributes, tensors, hooks, inner


def plain_value(value: Any, location: str) -> Any:
    """Returns `value` as nested plain values whose `repr` determines it, or else `location`, which is unique to the layer."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype)
    if isinstance(value, list | tuple):
        return [plain_value(item, location) for item in value]
    if isinstance(value, Mapping):
        return [(repr(key), plain_value(item, location)) for key, item in value.items()]
    if isinstance(value, BaseModel):
        return type(value).__qualname__, value.model_dump_json()
    if is_dataclass(value) and not isinstance(value, type):
        return type(value).__qualname__, plain_value(asdict(value), location)
    name = getattr(value, "__qualname__", "<")
    if callable(value) and "<" not in name and not hasattr(value, "__self__"):  # a function or class of a module
        return getattr(value, "__module__", ""), name
    return location


def layer_keys(plan: Plan, model: Model, policy: ActivationPolicy, fields: Mapping[str, Tensor]) -> list[str]:
    """Returns a key of 16 hexadecimal digits for each layer of `model`, on meta.

    fields: a microbatch, whose shapes and dtypes are part of the key, as are policy, precision and loss. `train-cli calibrate`
    writes the same keys for the plan in any layout with its `micro_size` and whole sequences.
    """
    return LayerKeys(plan, model, policy).keys(fields)


class LayerKeys:
    """Makes the keys of a plan's layers under one policy for any microbatch."""

    def __init__(self, plan: Plan, model: Model, policy: ActivationPolicy) -> None:
        last = len(model.layers) - 1
        precision = plan.precision.compute, plan.precision.gradients
        self._texts: list[tuple[str, str]] = []
        for index, layer in enumerate(model.layers):
            loss = (plan.loss.name, plain_value(plan.loss.config, "loss")) if index == last else None
            prefix = module_signature(layer.module, layer.name), layer.fields
            suffix = precision, (index == 0, loss), _policy_key(plan, policy, layer)
            self._texts.append((", ".join(map(repr, prefix)), ", ".join(map(repr, suffix))))

    def keys(self, fields: Mapping[str, Tensor]) -> list[str]:
        """Returns the key of each layer for a microbatch `fields`."""
        shapes = sorted((name, tuple(value.shape), str(value.dtype)) for name, value in fields.items())
        digests: dict[tuple[str, str], str] = {}
        for prefix, suffix in dict.fromkeys(self._texts):
            text = f"({', '.join([prefix, repr(shapes), suffix])})"
            digests[prefix, suffix] = hashlib.sha256(text.encode()).hexdigest()[:16]
        return [digests[text] for text in self._texts]


def _policy_key(plan: Plan, policy: ActivationPolicy, layer: Layer) -> Any:
    """Returns the policy's part of a layer key: None if the policy does not affect the layer. It includes the layer's name
    unless the policy lists names.
    """
    names = getattr(policy, "names", None)
    if type(policy) is Keep or (isinstance(names, frozenset) and layer.name not in names):
        return None
    chosen = None if isinstance(names, frozenset) else layer.name
    return plan.activations.name, plain_value(plan.activations.config, "activations"), chosen


Key = TypeVar("Key")
Value = TypeVar("Value")

ATTENTION = "attention"  # the operator name of a recorded attention
TENSORS, COPY = 4, 3  # q, k, v and the context; the bytes that a copy moves per byte in `describe_operator`

_MISSING: Any = object()


def memoize(results: dict[Key, Value | SleyError], key: Key, make: Callable[[], Value]) -> Value:
    """Returns `results[key]`, computed by `make` on the first call. A SleyError is stored and raised on every call."""
    value: Value | SleyError = results.get(key, _MISSING)
    if value is _MISSING:
        try:
            value = results[key] = make()
        except SleyError as error:
            value = results[key] = error
    if isinstance(value, SleyError):
        raise value
    return value


@dataclass(frozen=True)
class Variant:
    """The conditions under which layers run. sp: the number of ranks that share a sequence."""

    policy: Choice
    micro_size: int
    sp: int = 1

    @property
    def samples(self) -> float:
        """Returns the samples of a rank's microbatch. A slice is a fraction of a sample."""
        return self.micro_size / self.sp


class LayerVariants:
    """Holds keys and works of `model`, on meta for `plan`. Each policy is traced once, on its first use."""

    def __init__(self, plan: Plan, model: Model, dataset: AnyDataset) -> None:
        self.plan = plan
        self.model = model
        self.dataset = dataset
        self._names = [layer.name for layer in model.layers]
        self._traced: Traced = {}
        self._cached: dict[Hashable, Any] = {}

    def policy(self, policy: Choice) -> ActivationPolicy:
        """Returns the policy, built for the model's layers. Raises PlanError if it cannot be built."""
        return self._plan(policy)[1]

    def keys(self, variant: Variant) -> list[str]:
        """Returns each layer's key with whole sequences. Raises PlanError for a policy that cannot be built."""

        def make_keys() -> LayerKeys:
            plan, policy = self._plan(variant.policy)
            return LayerKeys(plan, self.model, policy)

        def make_fields() -> Mapping[str, Tensor]:
            return meta_micro_batch(apply_variant(self.plan, micro_size=variant.micro_size, sp=1), self.dataset)

        fields: Mapping[str, Tensor] = memoize(self._cached, ("fields", variant.micro_size), make_fields)
        layer_keys: LayerKeys = memoize(self._cached, ("keys", str(variant.policy)), make_keys)
        return layer_keys.keys(fields)

    def works(self, variant: Variant) -> list[LayerWork]:
        """Returns the work of each layer; equal layers share one object. For slices it includes the copies that attentions make
        for their exchanges. Raises PlanError for a policy that cannot be built, and PlanError "estimate-layer".
        """

        def scale(single: LayerWork, double: LayerWork) -> LayerWork:
            work = scale_work(single, double, variant.samples)
            return add_copies(work) if variant.sp > 1 else work

        pairs = zip(self._trace_works(variant.policy, 1), self._trace_works(variant.policy, 2), strict=True)
        return [
            memoize(self._cached, (id(single), variant.samples, variant.sp > 1), partial(scale, single, double))
            for single, double in pairs
        ]

    def _trace_works(self, policy: Choice, micro_size: int) -> list[LayerWork]:
        """Returns the work of each layer on whole samples."""

        def trace() -> list[LayerWork]:
            plan, _ = self._plan(policy)
            keys = self.keys(Variant(policy, micro_size))
            # New tensors, since layers cache results by tensor, such as position tables.
            fields = meta_micro_batch(apply_variant(plan, micro_size=micro_size), self.dataset)
            return layer_works(plan, self.model, fields, keys, self._traced)

        works: list[LayerWork] = memoize(self._cached, ("works", str(policy), micro_size), trace)
        return works

    def _plan(self, policy: Choice) -> tuple[Plan, ActivationPolicy]:
        """Returns the plan under a policy with whole sequences, and the built policy."""

        def build() -> tuple[Plan, ActivationPolicy]:
            plan = apply_variant(self.plan, policy=policy, sp=1)
            return plan, plan.activations.build(self._names)

        built: tuple[Plan, ActivationPolicy] = memoize(self._cached, ("plan", str(policy)), build)
        return built


def apply_variant(plan: Plan, *, policy: Choice | None = None, micro_size: int | None = None, sp: int | None = None) -> Plan:
    """Returns `plan` with another policy, `micro_size` or `sp`, or `plan` itself if nothing differs. Raises PlanError."""
    document, tables = plan.document.tables, dict[str, Any]()
    plan_policy = plan.activations
    if policy is not None and (policy.name, policy.config) != (plan_policy.name, plan_policy.config):
        tables["activations"] = policy.table
    for table, key, value, current in (
        ("batch", "micro_size", micro_size, plan.batch.micro_size),
        ("parallel", "sp", sp, plan.parallel.sp),
    ):
        if value is not None and value != current:
            tables[table] = {**document.get(table, {}), key: value}
    return replace_tables(plan, tables) if tables else plan


def scale_work(single: LayerWork, double: LayerWork, samples: float) -> LayerWork:
    """Returns the work on `samples` samples, which may be a fraction, by linear extrapolation of the works on one and on two
    samples. Operators that are more frequent on two samples, such as those of a chunked loss, are proportional to the work on
    two.
    """
    return LayerWork(
        **{name: _scale_operators(single.operators(name), double.operators(name), samples) for name in PHASES},
        num_parameters=single.num_parameters,
        output_bytes=_extrapolate(single.output_bytes, double.output_bytes, samples),
        saved_bytes=_extrapolate(single.saved_bytes, double.saved_bytes, samples),
    )


def add_copies(work: LayerWork) -> LayerWork:
    """Adds the copies of q, k, v and context that attentions over slices make in each forward, recomputation and backward."""

    def with_copies(operators: Sequence[Operator], forward: Sequence[Operator]) -> tuple[Operator, ...]:
        """Returns `operators` plus the copies of the tensors that each attention in `forward` reads or writes."""
        sizes = [operator.num_bytes for operator in forward if operator.name == ATTENTION]
        copies = [Operator("copy", COPY * num_bytes // TENSORS) for num_bytes in sizes for _ in range(TENSORS)]
        return (*operators, *copies)

    return replace(
        work,
        forward=with_copies(work.forward, work.forward),
        recompute=with_copies(work.recompute, work.recompute),
        backward=with_copies(work.backward, work.forward),
        input_gradient=with_copies(work.input_gradient, work.forward),
    )


def _scale_operators(single: Sequence[Operator], double: Sequence[Operator], samples: float) -> tuple[Operator, ...]:
    """Returns operators in the order of `double`, paired with `single` by name. A name with different counts has no pairs."""
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
    return round(single + (double - single) * (samples - 1))


def replace_tables(plan: Plan, tables: Mapping[str, Any]) -> Plan:
    """Returns a plan with replaced whole tables, which have no location; None removes a table. The plan is checked with the
    same plugins.
    """
    unchanged = {key: value for key, value in plan.document.tables.items() if key not in tables}
    replaced = {key: document.to_plain_data(value) for key, value in tables.items() if value is not None}
    return resolve_plan(replace(plan.document, tables={**unchanged, **replaced}), plan.loader)

"""Keys and work of a plan's layers in any variant: under another activation policy, on other micro-batches, on slices.

A policy is traced on one sample and on two. Shapes, bytes and FLOPs are linear in the number of samples except for weights, so
these give the work on any number; a slice of a sequence over n ranks is 1/n of a sample: of its positions, in attention of its
heads.

Keys are equal for layers that take as long and as much memory: of one class, with equal settings and shapes. An attribute that
is not known to be plain (a number, a text, a tensor's shape) makes its layer differ from all others: that layer is counted on
its own, which takes longer and is never wrong.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from sley_core.data.batches import Slices, sliced_info
from sley_core.engine.call import Keep
from sley_core.errors import SleyError
from sley_core.plan import document
from sley_core.plan.load import resolve_plan
from sley_estimate.layers.operators import PHASES, LayerWork, Operator
from sley_estimate.layers.trace import Traced, layer_works
from train_cli.on_meta import meta_micro_batch

if TYPE_CHECKING:
    from sley_core.data.dataset import AnyDataset
    from sley_core.model.layers import Layer, Model
    from sley_core.plan.plan import Component, Plan
    from sley_core.protocols import ActivationPolicy
    from sley_estimate.search.layouts import Choice

PLAIN = (str, int, float, bool, bytes, type(None), torch.dtype, torch.device, torch.Size, Enum)
OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def kind_of(module: nn.Module, place: str) -> Any:
    """Returns nested plain values that determine the module's cost: modules with equal `repr`s cost the same. place: the
    module's name in the model, which stands for attributes that are not plain.
    """
    attributes = [
        (name, plain(value, f"{place}.{name}"))
        for name, value in sorted(vars(module).items())
        if name not in OF_EVERY_MODULE or name == "training"
    ]
    tensors = [
        (name, None if value is None else (tuple(value.shape), str(value.dtype), value.requires_grad))
        for registered in (module._parameters, module._buffers)
        for name, value in registered.items()
    ]
    hooks = [(name, place) for name in OF_EVERY_MODULE if name.endswith("hooks") and vars(module)[name]]
    inner = [(name, child and kind_of(child, f"{place}.{name}")) for name, child in module._modules.items()]
    local = place if "<" in type(module).__qualname__ else ""  # a class defined in a function depends on its arguments
    return type(module).__module__, type(module).__qualname__, local, attributes, tensors, hooks, inner


def plain(value: Any, place: str) -> Any:
    """Returns `value` as nested plain values whose `repr` determines it; else its place, which no other layer has."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype)
    if isinstance(value, list | tuple):
        return [plain(each, place) for each in value]
    if isinstance(value, Mapping):
        return [(repr(key), plain(each, place)) for key, each in value.items()]
    if isinstance(value, BaseModel):
        return type(value).__qualname__, value.model_dump_json()
    if is_dataclass(value) and not isinstance(value, type):
        return type(value).__qualname__, plain(asdict(value), place)
    name = getattr(value, "__qualname__", "<")
    if callable(value) and "<" not in name and not hasattr(value, "__self__"):  # a function or class of a module
        return getattr(value, "__module__", ""), name
    return place


def layer_keys(plan: Plan, model: Model, policy: ActivationPolicy, fields: Mapping[str, Tensor]) -> list[str]:
    """Returns a key of 16 hexadecimal digits for each layer of `model`, on meta.

    fields: a micro-batch, whose shapes and dtypes count; policy, precision and loss count too. `train-cli calibrate` writes the
    same keys for the plan in any layout with its `micro_size` and `sp`.
    """
    sequence = plan.sequence
    slices = slices_of(plan.parallel.sp, sequence.name, sequence.config) if sequence is not None else ()
    return LayerKinds(plan, model, policy).keys(fields, slices)


def slices_of(sp: int, attention: str, config: Any) -> tuple[Any, ...]:
    """Returns what cutting sequences over `sp` ranks adds to keys; () for whole sequences."""
    return (sp, attention, plain(config, "sequence")) if sp > 1 else ()


class LayerKinds:
    """Makes keys of a plan's layers under one policy, for any micro-batch and slices."""

    def __init__(self, plan: Plan, model: Model, policy: ActivationPolicy) -> None:
        last = len(model.layers) - 1
        precision = plan.precision.compute, plan.precision.gradients
        self._texts: list[tuple[str, str]] = []
        for at, layer in enumerate(model.layers):
            loss = (plan.loss.name, plain(plan.loss.config, "loss")) if at == last else None
            before = kind_of(layer.module, layer.name), layer.fields
            after = precision, (at == 0, loss), _treatment(plan, policy, layer)
            self._texts.append((", ".join(map(repr, before)), ", ".join(map(repr, after))))

    def keys(self, fields: Mapping[str, Tensor], slices: tuple[Any, ...] = ()) -> list[str]:
        """Returns the key of each layer for a micro-batch `fields`. slices: as `slices_of` returns."""
        shapes = sorted((name, tuple(value.shape), str(value.dtype)) for name, value in fields.items())
        known: dict[tuple[str, str], str] = {}
        for before, after in dict.fromkeys(self._texts):
            text = f"({', '.join([before, repr(shapes), after, *map(repr, slices)])})"
            known[before, after] = hashlib.sha256(text.encode()).hexdigest()[:16]
        return [known[text] for text in self._texts]


def _treatment(plan: Plan, policy: ActivationPolicy, layer: Layer) -> Any:
    """Returns the policy's part of a layer's key: None if it leaves the layer alone; its name unless the policy lists names."""
    names = getattr(policy, "names", None)
    if type(policy) is Keep or (isinstance(names, frozenset) and layer.name not in names):
        return None
    chosen = None if isinstance(names, frozenset) else layer.name
    return plan.activations.name, plain(plan.activations.config, "activations"), chosen


Key = TypeVar("Key")
Value = TypeVar("Value")

ATTENTION = "attention"  # the operator as which an attention is recorded
TENSORS, COPY = 4, 3  # q, k, v and the context; and how many bytes a copy moves per byte, as `operator_of` counts

_MISSING: Any = object()


def once(known: dict[Key, Value | SleyError], key: Key, make: Callable[[], Value]) -> Value:
    """Returns `known[key]`, made by `make` the first time. A SleyError that `make` raises is kept and raised each time."""
    value: Value | SleyError = known.get(key, _MISSING)
    if value is _MISSING:
        try:
            value = known[key] = make()
        except SleyError as error:
            value = known[key] = error
    if isinstance(value, SleyError):
        raise value
    return value


@dataclass(frozen=True)
class Variant:
    """How layers run. sp: ranks that share a sequence."""

    policy: Choice
    micro_size: int
    sp: int = 1

    @property
    def samples(self) -> float:
        """Returns the samples of a rank's micro-batch; a slice is a share of one."""
        return self.micro_size / self.sp


class LayerVariants:
    """Keys and works of `model`, on meta for `plan`; each policy is traced once, when it is asked for."""

    def __init__(self, plan: Plan, model: Model, dataset: AnyDataset) -> None:
        self.plan = plan
        self.model = model
        self.dataset = dataset
        self._names = [layer.name for layer in model.layers]
        self._plans: dict[str, tuple[Plan, ActivationPolicy] | SleyError] = {}
        self._kinds: dict[str, LayerKinds | SleyError] = {}
        self._batches: dict[int, Mapping[str, Tensor] | SleyError] = {}
        self._traced: Traced = {}
        self._works: dict[tuple[str, int], list[LayerWork] | SleyError] = {}
        self._grown: dict[tuple[int, float, bool], LayerWork | SleyError] = {}

    def policy(self, policy: Choice) -> ActivationPolicy:
        """Returns the policy, built for the model's layers. Raises PlanError for one that cannot be built."""
        return self._plan(policy)[1]

    def keys(self, variant: Variant, attention: Choice | Component | None = None) -> list[str]:
        """Returns each layer's key. attention: needed with `sp` > 1. Raises PlanError for a policy that cannot be built."""

        def kinds() -> LayerKinds:
            plan, policy = self._plan(variant.policy)
            return LayerKinds(plan, self.model, policy)

        fields: Mapping[str, Tensor] = once(
            self._batches,
            variant.micro_size,
            lambda: meta_micro_batch(with_variant(self.plan, micro_size=variant.micro_size, sp=1), self.dataset),
        )
        slices: tuple[Any, ...] = ()
        if variant.sp > 1:
            assert attention is not None, variant
            slices = slices_of(variant.sp, attention.name, attention.config)
            info = sliced_info(self.dataset.info, variant.sp)  # raises where data has no sequences
            declared = {name: field for name, field in info.fields.items() if name in fields}
            fields = Slices(declared, variant.sp, 0)(fields)
        return once(self._kinds, str(variant.policy), kinds).keys(fields, slices)

    def works(self, variant: Variant) -> list[LayerWork]:
        """Returns the work of each layer; the same object for equal layers. On slices it includes the copies that attentions
        make for their exchanges. Raises PlanError for a policy that cannot be built, "estimate-layer".
        """

        def grow(one: LayerWork, two: LayerWork) -> LayerWork:
            work = grown(one, two, variant.samples)
            return with_copies(work) if variant.sp > 1 else work

        pairs = zip(self._on_samples(variant.policy, 1), self._on_samples(variant.policy, 2), strict=True)
        return [once(self._grown, (id(one), variant.samples, variant.sp > 1), partial(grow, one, two)) for one, two in pairs]

    def _on_samples(self, policy: Choice, micro_size: int) -> list[LayerWork]:
        """Returns the work of each layer on whole samples."""

        def trace() -> list[LayerWork]:
            plan, _ = self._plan(policy)
            keys = self.keys(Variant(policy, micro_size))
            # Tensors of its own: layers keep results for tensors seen before, such as tables of positions.
            fields = meta_micro_batch(with_variant(plan, micro_size=micro_size), self.dataset)
            return layer_works(plan, self.model, fields, keys, self._traced)

        return once(self._works, (str(policy), micro_size), trace)

    def _plan(self, policy: Choice) -> tuple[Plan, ActivationPolicy]:
        """Returns the plan under a policy, with whole sequences, and the policy, built."""

        def build() -> tuple[Plan, ActivationPolicy]:
            plan = with_variant(self.plan, policy=policy, sp=1)
            return plan, plan.activations.build(self._names)

        return once(self._plans, str(policy), build)


def with_variant(plan: Plan, *, policy: Choice | None = None, micro_size: int | None = None, sp: int | None = None) -> Plan:
    """Returns `plan` with another policy, `micro_size` or `sp`; itself if nothing differs. Raises PlanError."""
    document, tables = plan.document.tables, dict[str, Any]()
    own = plan.activations
    if policy is not None and (policy.name, policy.config) != (own.name, own.config):
        tables["activations"] = policy.table
    for table, key, value, present in (
        ("batch", "micro_size", micro_size, plan.batch.micro_size),
        ("parallel", "sp", sp, plan.parallel.sp),
    ):
        if value is not None and value != present:
            tables[table] = {**document.get(table, {}), key: value}
    return with_tables(plan, tables) if tables else plan


def grown(one: LayerWork, two: LayerWork, samples: float) -> LayerWork:
    """Returns the work on `samples` samples (a share of one, too), on the line through the works on one and on two samples.
    Operators of a name that occurs more often on two samples, as those of a loss taken in pieces, are in proportion to two.
    """
    return LayerWork(
        **{name: _operators(one.of(name), two.of(name), samples) for name in PHASES},
        num_parameters=one.num_parameters,
        output_bytes=_line(one.output_bytes, two.output_bytes, samples),
        kept_bytes=_line(one.kept_bytes, two.kept_bytes, samples),
    )


def with_copies(work: LayerWork) -> LayerWork:
    """Adds the copies that attentions over slices make: each forward, recomputation and backward, of q, k, v and context."""

    def copied(operators: Sequence[Operator], attentions: Sequence[Operator]) -> tuple[Operator, ...]:
        sizes = [operator.num_bytes for operator in attentions if operator.name == ATTENTION]
        copies = [Operator("copy", COPY * num_bytes // TENSORS) for num_bytes in sizes for _ in range(TENSORS)]
        return (*operators, *copies)

    return replace(
        work,
        forward=copied(work.forward, work.forward),
        recompute=copied(work.recompute, work.recompute),
        backward=copied(work.backward, work.forward),
        input_gradient=copied(work.input_gradient, work.forward),
    )


def _operators(one: Sequence[Operator], two: Sequence[Operator], samples: float) -> tuple[Operator, ...]:
    """Returns operators in the order of `two`, paired by name; a name that is not as often in both has no pair."""
    firsts: dict[str, list[Operator]] = defaultdict(list)
    for operator in one:
        firsts[operator.name].append(operator)
    counts = Counter(operator.name for operator in two)
    pairs = {name: iter(operators) for name, operators in firsts.items() if len(operators) == counts[name]}
    operators = []
    for second in two:
        first = next(pairs[second.name]) if second.name in pairs else None
        if first is None:
            sizes = round(second.num_bytes * (samples / 2)), round(second.flops * (samples / 2))
        else:
            sizes = _line(first.num_bytes, second.num_bytes, samples), _line(first.flops, second.flops, samples)
        operators.append(replace(second, num_bytes=sizes[0], flops=sizes[1]))
    return tuple(operators)


def _line(one: int, two: int, samples: float) -> int:
    return round(one + (two - one) * (samples - 1))


def with_tables(plan: Plan, tables: Mapping[str, Any]) -> Plan:
    """Returns a plan with whole tables changed, which have no place; None removes one. Checked with the same plugins."""
    kept = {key: value for key, value in plan.document.tables.items() if key not in tables}
    given = {key: document.to_plain_data(value) for key, value in tables.items() if value is not None}
    return resolve_plan(replace(plan.document, tables={**kept, **given}), plan.loader)

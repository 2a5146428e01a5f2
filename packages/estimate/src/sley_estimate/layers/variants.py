"""Finds keys and work of a plan's layers in any variant: under another activation policy, on other micro-batches, on slices of
sequences.

    policy, micro-batch ──> keys of all layers
    policy              ──> traced on one sample and on two ──> work on any number of samples, on any slice

It looks at nothing before it is asked, and at each policy once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from sley_core.data.batches import Slices, sliced_info
from sley_core.errors import SleyError
from sley_core.plan.load import with_tables
from sley_estimate.layers.distinct import LayerKinds, slices_of
from sley_estimate.layers.grown import grown, with_copies
from sley_estimate.layers.once import once
from sley_estimate.layers.operators import LayerWork
from sley_estimate.layers.works import Traced, layer_works
from train_cli.on_meta import meta_micro_batch

if TYPE_CHECKING:
    from sley_core.data.dataset import AnyDataset
    from sley_core.model.layers import Model
    from sley_core.plan.plan import Plan
    from sley_core.protocols import ActivationPolicy
    from sley_estimate.search.choices import Choice


class SlicedAttention(Protocol):
    """What attends over slices, as a plan's component or a search's choice has it."""

    @property
    def name(self) -> str: ...
    @property
    def config(self) -> Any: ...


@dataclass(frozen=True)
class Variant:
    """How layers run. sp: over how many ranks a sequence is cut."""

    policy: Choice
    micro_size: int
    sp: int = 1

    @property
    def samples(self) -> float:
        """Returns how many samples a rank has of a micro-batch; a slice of one is a share."""
        return self.micro_size / self.sp


class LayerVariants:
    """Makes keys and works of `model`, drafted on meta for `plan`."""

    def __init__(self, plan: Plan, model: Model, dataset: AnyDataset) -> None:
        self.plan = plan
        self.model = model
        self.dataset = dataset
        self._names = [layer.name for layer in model.layers]
        self._plans: dict[str, tuple[Plan, ActivationPolicy] | SleyError] = {}
        self._kinds: dict[str, LayerKinds] = {}
        self._batches: dict[int, dict[str, Tensor]] = {}
        self._traced: Traced = {}
        self._works: dict[tuple[str, int], list[LayerWork] | SleyError] = {}
        self._grown: dict[tuple[int, float, bool], LayerWork] = {}

    def policy(self, policy: Choice) -> ActivationPolicy:
        """Returns a policy, built for the model's layers. Raises PlanError for one that cannot be built."""
        return self._plan(policy)[1]

    def keys(self, variant: Variant, attention: SlicedAttention | None = None) -> list[str]:
        """Returns the key of each layer, 16 hexadecimal digits, equal for layers that take as long and as much memory as each
        other.

        attention: what attends over slices; needed where a sequence is cut. Raises PlanError for a policy that cannot be built.
        """
        policy = variant.policy
        if str(policy) not in self._kinds:
            plan, built = self._plan(policy)
            self._kinds[str(policy)] = LayerKinds(plan, self.model, built)
        fields: Mapping[str, Tensor] = self._fields(variant.micro_size)
        slices: tuple[Any, ...] = ()
        if variant.sp > 1:
            assert attention is not None, variant
            slices = slices_of(variant.sp, attention.name, attention.config)
            info = sliced_info(self.dataset.info, variant.sp)  # raises where data has no sequences
            declared = {name: field for name, field in info.fields.items() if name in fields}
            fields = Slices(declared, variant.sp, 0)(fields)
        return self._kinds[str(policy)].keys(fields, slices)

    def works(self, variant: Variant) -> list[LayerWork]:
        """Returns the work of each layer, from traces on one sample and on two; the same object for layers that are alike. On
        slices it includes the copies that attentions make for what they swap.

        Raises PlanError for a policy that cannot be built, "estimate-layer" for a layer that cannot be counted.
        """
        pairs = zip(self.traced(variant.policy, 1), self.traced(variant.policy, 2), strict=True)
        return [self._grown_once(one, two, variant.samples, is_slice=variant.sp > 1) for one, two in pairs]

    def traced(self, policy: Choice, micro_size: int) -> list[LayerWork]:
        """Returns the work of each layer on `micro_size` whole samples, traced the first time.

        Raises PlanError for a policy that cannot be built, "estimate-layer" for a layer that cannot be counted.
        """

        def traced() -> list[LayerWork]:
            """Traces all layers on a new micro-batch on meta."""
            plan, _ = self._plan(policy)
            keys = self.keys(Variant(policy, micro_size))
            # Tensors of its own: of those seen before, layers do not make again what they keep, as tables of positions.
            fields = meta_micro_batch(with_variant(plan, micro_size=micro_size), self.dataset)
            return layer_works(plan, self.model, fields, keys, self._traced)

        return once(self._works, (str(policy), micro_size), traced)

    def _grown_once(self, one: LayerWork, two: LayerWork, samples: float, *, is_slice: bool) -> LayerWork:
        """Returns the work on `samples` samples, grown from that on one and on two; the same object for the same arguments.
        is_slice: adds the copies that attentions make for what they swap.
        """
        key = id(one), samples, is_slice
        if key not in self._grown:
            work = grown(one, two, samples)
            self._grown[key] = with_copies(work) if is_slice else work
        return self._grown[key]

    def _plan(self, policy: Choice) -> tuple[Plan, ActivationPolicy]:
        """Returns the plan with whole sequences under a policy, and the policy, built for its layers; made once."""

        def made() -> tuple[Plan, ActivationPolicy]:
            plan = with_variant(self.plan, policy=policy, sp=1)
            return plan, plan.activations.build(self._names)

        return once(self._plans, str(policy), made)

    def _fields(self, micro_size: int) -> dict[str, Tensor]:
        """Returns a micro-batch of whole sequences on meta, for its shapes; made once for each size."""
        if micro_size not in self._batches:
            plan = with_variant(self.plan, micro_size=micro_size, sp=1)
            self._batches[micro_size] = meta_micro_batch(plan, self.dataset)
        return self._batches[micro_size]


def with_variant(plan: Plan, *, policy: Choice | None = None, micro_size: int | None = None, sp: int | None = None) -> Plan:
    """Returns `plan` with another policy, size of micro-batch or `sp` in its tables; None leaves each as it is. The plan itself
    if nothing differs. Raises PlanError for a plan that cannot be read so.
    """
    given, tables = plan.document.tables, dict[str, Any]()
    own = plan.activations
    if policy is not None and (policy.name, policy.config) != (own.name, own.config):
        tables["activations"] = policy.table
    for table, key, value, has in (
        ("batch", "micro_size", micro_size, plan.batch.micro_size),
        ("parallel", "sp", sp, plan.parallel.sp),
    ):
        if value is not None and value != has:
            tables[table] = {**given.get(table, {}), key: value}
    return with_tables(plan, tables) if tables else plan

"""Prices layers that a machine file has in some variants, in all others: counted, in proportion to the nearest one measured.

Seconds that were measured and seconds that are counted from operators may be far apart. So where some variants of a layer were
measured (under one policy, on micro-batches of one size) all are in their measure, or policies and sizes would be put in
order by which of them was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import log2
from typing import TYPE_CHECKING, Literal

from sley_core.errors import SleyError
from sley_estimate.layers.variants import LayerVariants, SlicedAttention, Variant
from sley_estimate.seconds.layer_seconds import LayerSeconds

if TYPE_CHECKING:
    from sley_estimate.layers.operators import LayerWork
    from sley_estimate.machine.tables import MachineFile
    from sley_estimate.search.choices import Choices

Source = Literal["measured", "in proportion", "counted"]
"""Where the seconds of a layer come from: its own in the machine file; counted, in proportion to another variant that is there;
counted alone."""


@dataclass(frozen=True, eq=False)
class Near:
    """What the machine file has of a layer: it took `seconds` as `variant`."""

    variant: Variant
    seconds: LayerSeconds


class NearestLayers:
    """Prices layers of `variants` with what `machine` has of them. choices: of policies under which they may be there, and of
    attentions over slices.
    """

    def __init__(self, variants: LayerVariants, machine: MachineFile, choices: Choices) -> None:
        self.variants = variants
        self.machine = machine
        self.policies = choices.policies
        self.attention: SlicedAttention | None = choices.attention[0] if choices.attention else None
        self._known = {table.key: LayerSeconds.measured(table) for table in machine.layers}
        self._there: list[tuple[Near, ...]] | None = None

    def measured(self, variant: Variant, attention: SlicedAttention | None = None) -> list[LayerSeconds | None]:
        """Returns, for each layer as it is in `variant`, the seconds that the machine file has of it, or None. attention: what
        attends over slices; needed where a sequence is cut.
        """
        if not self._known:
            return [None] * len(self.variants.model.layers)
        return [self._known.get(key) for key in self.variants.keys(variant, attention)]

    def priced(
        self, variant: Variant, works: Sequence[LayerWork], attention: SlicedAttention | None = None
    ) -> list[tuple[LayerSeconds, Source]]:
        """Returns the seconds of each layer in `variant`, without what slices exchange, and where they come from: the machine
        file's, counted in proportion to the nearest variant there, or counted alone.

        works: of the layers in this variant; one object for layers that are alike. attention: what attends over slices; needed
        where a sequence is cut. Raises PlanError "machine-matmul" for a product of a dtype that the machine file does not have.
        """
        known: dict[tuple[int, LayerSeconds | None, Near | None], tuple[LayerSeconds, Source]] = {}
        found = []
        for at, (work, own, near) in enumerate(zip(works, self.measured(variant, attention), self._near(variant), strict=True)):
            key = id(work), own, near
            if key not in known:
                known[key] = (own, "measured") if own else self._unmeasured(at, work, near)
            found.append(known[key])
        return found

    def _unmeasured(self, at: int, work: LayerWork, near: Near | None) -> tuple[LayerSeconds, Source]:
        """Returns the seconds of layer number `at`, which does `work`, and their source: in proportion to `near`; counted alone
        if that is None or cannot be counted.
        """
        device, starts = self.machine.device, self.machine.engine is not None
        if near is None:
            return LayerSeconds.computed(work, device, starts=starts), "counted"
        try:
            there = self.variants.works(near.variant)[at]
        except SleyError:  # measured as it was, it cannot be counted
            return LayerSeconds.computed(work, device, starts=starts), "counted"
        return LayerSeconds.in_proportion(work, there, near.seconds, device), "in proportion"

    def _near(self, variant: Variant) -> list[Near | None]:
        """Returns for each layer what the machine file has of it in the nearest variant, or None: with as many samples, or
        about as many; then cut alike; then under the same policy.
        """
        if not self._known:
            return [None] * len(self.variants.model.layers)
        if self._there is None:
            self._there = self._all_there()

        def distance(near: Near) -> tuple[float, bool, bool]:
            other = near.variant
            samples = abs(log2(other.samples / variant.samples))
            return samples, other.sp != variant.sp, str(other.policy) != str(variant.policy)

        nearest = {some: min(some, key=distance, default=None) for some in set(self._there)}
        return [nearest[some] for some in self._there]

    def _all_there(self) -> list[tuple[Near, ...]]:
        """Returns for each layer all variants of it that the machine file has; equal for layers that are alike."""
        found: list[list[tuple[Variant, str]]] = [[] for _ in self.variants.model.layers]
        for variant in self._possible():
            try:
                keys = self.variants.keys(variant, self.attention)
            except SleyError:  # a policy that cannot be built here was measured nowhere
                continue
            for some, key in zip(found, keys, strict=True):
                if key in self._known and all(key != other for _, other in some):
                    some.append((variant, key))
        nears: dict[str, Near] = {}
        for variant, key in (one for some in found for one in some):
            nears.setdefault(key, Near(variant, self._known[key]))
        return [tuple(nears[key] for _, key in some) for some in found]

    def _possible(self) -> Iterator[Variant]:
        """Yields variants in which layers may have been measured: of all policies that do not copy, sizes and slices that the
        file names; where older tables name no size, of all powers of two up to the plan's batch.
        """
        plan, tables = self.variants.plan, self.machine.layers
        sizes = {plan.batch.micro_size, *(table.micro_size for table in tables if table.micro_size)}
        if any(table.micro_size is None for table in tables):
            sizes |= {1 << bits for bits in range(plan.batch.global_size.bit_length())}
        slices = {1, plan.parallel.sp, *(table.sp for table in tables)} if self.attention else {1}
        alone = (one for one in self.policies if not one.copies)  # copies are priced by themselves
        yield from (Variant(*one) for one in product(alone, sorted(sizes), sorted(slices)))

"""What layouts share that differ in their micro-batches alone: exchanges of gradients and weights, states, the update.

stages, shards, parts of the model, reducer ──> per layer: elements held and stepped, costs of exchanges
                                            ──> per stage: seconds of sums, gathers and the update, bytes of states
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from sley_core.draft import DTYPES, dtypes
from sley_core.estimate.seconds.links import NOTHING, collective
from sley_core.estimate.stage_facts import num_states
from sley_core.search.glance import reduces
from sley_core.search.layer_table import once
from sley_core.search.offloaded import StepCosts, stepping
from sley_core.topology import Topology

if TYPE_CHECKING:
    from sley_core.errors import SleyError
    from sley_core.estimate.machine.tables import MachineFile
    from sley_core.plan.plan import Plan
    from sley_core.protocols import Collective
    from sley_core.search.layer_table import LayerTables
    from sley_core.search.layouts import Shape
    from sley_core.search.stage_cut import Floats, ModelParts

MOST_LAYERS_WHOLE = 2
"""How many layers have whole weights at once where weights are sharded: one that computes, and the one after it."""

Owned = TypeVar("Owned", NDArray[np.float64], float)

Exchanged = NDArray[np.float64]
"""The three parts of `Cost`, of each layer: [3, layers]."""


class OfLayers(NamedTuple):
    """Exchanges of each layer: sums of its gradients, or their reductions and gathers of what is stepped; once: reductions of
    the gradients of shards that come once a step.
    """

    sums: Exchanged
    gathers: Exchanged
    once: Exchanged


class OfStages(NamedTuple):
    """Per stage: seconds of sums (or reductions), of gathers, of norm and update; bytes of weights, gradients and states."""

    sums: Floats
    gathers: Floats
    update_s: Floats
    states_bytes: Floats
    exchanged: OfLayers


class Least(NamedTuple):
    """Of all layers: seconds of the cheapest exchanges and of the update; the fewest bytes of weights, gradients, states."""

    exchanged_s: float
    update_s: float
    num_bytes: float


class StageCosts:
    """Makes these for all layouts of a plan, each once."""

    def __init__(self, plan: Plan, world: int, machine: MachineFile, tables: LayerTables) -> None:
        self.plan = plan
        self.world = world
        self.machine = machine
        self.tables = tables
        self._of: dict[Hashable, OfStages | SleyError] = {}
        self._least: dict[Hashable, Least | SleyError] = {}
        self._exchanged: dict[Hashable, Exchanged | SleyError] = {}

    def of(self, shape: Shape, parts: ModelParts, *, every: bool) -> OfStages:
        """Returns it for the layouts of a shape with these parts. every: whether each rank steps a part of its weights."""
        key = shape.sizes.pp, shape.sizes.wp, str(shape.weights), str(shape.offload), parts, every
        return once(self._of, key, lambda: self._of_stages(shape, parts, every))

    def least(self, shape: Shape) -> Least:
        """Returns what no layout of a shape undercuts."""

        def least() -> Least:
            held, owned = self._held_elements(shape, every=True)
            seconds = float(sum(each.sum() for each in self._exchange(shape, "reduce")))
            state_bytes = self.steps.state_bytes(stepping(shape.offload))
            return Least(
                seconds, self._update_s(owned.sum(), shape), held.sum() * self.weight_bytes + owned.sum() * state_bytes
            )

        return once(self._least, (shape.sizes.pp, shape.sizes.wp, str(shape.weights), str(shape.offload)), least)

    def _of_stages(self, shape: Shape, parts: ModelParts, every: bool) -> OfStages:
        sums = self._exchange(shape, "reduce" if every else "sum")
        exchanged = OfLayers(sums, self._exchange(shape, "gather" if every else None), self._reduced_once(shape))
        held, owned = map(parts.by_stage, self._held_elements(shape, every=every))
        sums_s, gathers_s = (self._by_stage(parts, costs) for costs in exchanged[:2])
        state_bytes = self.steps.state_bytes(stepping(shape.offload))
        states = held * self.weight_bytes + owned * state_bytes + self._gathered_bytes(shape, parts)
        return OfStages(sums_s, gathers_s, self._update_s(owned, shape), states, exchanged)

    def _by_stage(self, parts: ModelParts, costs: Exchanged) -> Floats:
        """Returns the seconds of the exchanges of each stage's layers."""
        latency_s, work_s, attended_s = map(parts.by_stage, costs)
        return latency_s + work_s + attended_s

    def _held_elements(self, shape: Shape, *, every: bool) -> tuple[np.ndarray, np.ndarray]:
        """Returns, for each layer, the elements that a rank holds of its weights, and those that it steps.

        every: whether each of those that hold an element alike steps a part of it.
        """
        sizes, cut = shape.sizes, self.tables.cut(shape)
        ranks = self.world // sizes.pp
        shards, whole = cut / sizes.wp, self.tables.numel - cut
        held = shards + whole
        return held, (shards / (ranks // sizes.wp) + whole / ranks) if every else held

    def _exchange(self, shape: Shape, kind: Collective | None) -> Exchanged:
        """Returns the cost of an exchange of each layer's gradients, or of its weights: of shards with their replicas, and of
        the rest in the stage. None: nothing is exchanged. All stages are as the first.
        """
        sizes = shape.sizes
        key = kind, sizes.pp, sizes.wp, str(shape.weights)

        def costs() -> Exchanged:
            cut = self.tables.cut(shape)
            topology = Topology(self.world, sizes.pp, wp=sizes.wp)
            one = self._of_layers(kind, -(-cut // sizes.wp), topology.ranks_of("wdp", 0))
            other = self._of_layers(kind, self.tables.numel - cut, topology.ranks_of("stage", 0))
            return one + other

        return once(self._exchanged, key, costs)

    def _reduced_once(self, shape: Shape) -> Exchanged:
        """Returns the same of the reductions of shards' gradients that come once a step."""
        is_once = reduces(shape.weights) == "step"
        return self._of_layers("reduce" if is_once else None, self.tables.cut(shape), range(shape.sizes.wp))

    def _of_layers(self, kind: Collective | None, elements: np.ndarray, ranks: Sequence[int]) -> Exchanged:
        if kind is None:
            return np.zeros((len(NOTHING), len(elements)))
        itemsize = dtypes(self.plan)[0].itemsize if kind == "gather" else DTYPES[self.plan.precision.gradients].itemsize
        known = {
            count: collective(kind, count * itemsize, ranks, self.machine.links)
            for count in set(elements.tolist())
            if count
        }
        found = [known.get(count, NOTHING) for count in elements.tolist()]
        return np.array(found).T

    def _update_s(self, owned: Owned, shape: Shape) -> Owned:
        """Returns the seconds of the norm and update of so many elements, copies to the host and back included."""
        return owned * self.steps.update_s(stepping(shape.offload))

    def _gathered_bytes(self, shape: Shape, parts: ModelParts) -> Floats:
        """Returns the bytes of whole weights, and of whole gradients, that each stage has for a while."""
        if shape.weights is None:
            return np.zeros(shape.sizes.pp)
        cut = self.tables.cut(shape)
        working, gradient = dtypes(self.plan)[0].itemsize, DTYPES[self.plan.precision.gradients].itemsize
        largest = np.maximum.reduceat(cut, parts.starts)
        most = (MOST_LAYERS_WHOLE * largest)[parts.places].max(axis=0)
        whole = parts.by_stage(cut) if reduces(shape.weights) == "step" else most
        return np.asarray(most * working + whole * gradient, dtype=np.float64)

    @cached_property
    def steps(self) -> StepCosts:
        """What an element costs the rank that steps it."""
        return StepCosts(self.plan, self.machine, num_states(self.plan))

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of a parameter that every rank holds that has it: its working copy and its gradient."""
        return dtypes(self.plan)[0].itemsize + DTYPES[self.plan.precision.gradients].itemsize

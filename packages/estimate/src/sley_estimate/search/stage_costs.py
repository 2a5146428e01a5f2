"""Prices what layouts share that differ in their micro-batches alone: exchanges of gradients and weights,
states, the update.

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
from sley_core.topology import Topology
from sley_estimate.layers.once import once
from sley_estimate.search.buckets import Pieces, bucket_bytes, fewest, filled, per_layer
from sley_estimate.search.choices import choices_of
from sley_estimate.search.glance import leaves_shards, reduces
from sley_estimate.search.offloaded import StepCosts, stepping
from sley_estimate.seconds.groups import all_groups
from sley_estimate.seconds.links import NOTHING, collective
from sley_estimate.stage_facts import num_states

if TYPE_CHECKING:
    from sley_core.errors import SleyError
    from sley_core.plan.plan import Plan
    from sley_core.protocols import Collective
    from sley_estimate.machine.tables import MachineFile
    from sley_estimate.search.choices import Choice
    from sley_estimate.search.layer_table import LayerTables
    from sley_estimate.search.layouts import Shape
    from sley_estimate.search.parameters import Counted
    from sley_estimate.search.stage_cut import Floats, ModelParts

LARGE_BYTES = 1 << 40
"""Of an exchange whose latency is nothing beside its bytes."""

Owned = TypeVar("Owned", NDArray[np.float64], float)

Exchanged = NDArray[np.float64]
"""The three parts of `Cost`, of each layer: [3, layers]."""

BESIDE = slice(0, 2)
"""The parts that run beside computing, and beside what of other exchanges does not."""

ATTENDED = 2
"""The part that does not."""


class OfLayers(NamedTuple):
    """Holds the costs of each layer's exchanges, [3, layers] each: sums of its gradients, or their reductions; gathers of the
    weights that ranks step in parts; and in `once` reductions of sharded weights' gradients that come once a step.
    """

    sums: Exchanged
    gathers: Exchanged
    once: Exchanged


class OfStages(NamedTuple):
    """Holds, for each stage: seconds of sums (or reductions) of gradients, and of gathers of weights, as far as these may run
    beside computing; seconds of both that do not; seconds of norm and update; bytes of weights, gradients and optimizer states;
    bytes that there are before the first step. exchanged: costs of each layer's exchanges.
    """

    sums: Floats
    gathers: Floats
    attended: Floats
    update_s: Floats
    states_bytes: Floats
    start_bytes: Floats
    exchanged: OfLayers


class Least(NamedTuple):
    """Holds, summed over all layers: seconds of the cheapest exchanges of gradients, as far as these may run beside computing
    and as far as not, seconds of the update, and the fewest bytes of weights, gradients and optimizer states.
    """

    exchanged_s: float
    attended_s: float
    update_s: float
    num_bytes: float


class StageCosts:
    """Makes `OfStages` and `Least` for all layouts of a plan, each once."""

    def __init__(self, plan: Plan, world: int, machine: MachineFile, tables: LayerTables) -> None:
        self.plan = plan
        self.world = world
        self.machine = machine
        self.tables = tables
        self._of: dict[Hashable, OfStages | SleyError] = {}
        self._least: dict[Hashable, Least | SleyError] = {}
        self._buckets = {bucket_bytes(reducer) for reducer in choices_of(plan).reducers} or {None}
        self._exchanged: dict[Hashable, OfLayers | SleyError] = {}
        self._priced: dict[Hashable, tuple[Exchanged, Exchanged] | SleyError] = {}
        self._pieces: dict[Hashable, tuple[Pieces, Pieces] | SleyError] = {}

    def of(self, shape: Shape, parts: ModelParts, reducer: Choice | None) -> OfStages:
        """Returns the seconds and bytes of each stage that layouts of a shape have in common, if the model is cut into `parts`
        and `reducer` sums gradients.
        """
        every, bucket = leaves_shards(reducer), bucket_bytes(reducer)
        key = shape.sizes.pp, shape.sizes.wp, str(shape.weights), str(shape.offload), parts, every, bucket
        return once(self._of, key, lambda: self._of_stages(shape, parts, every, bucket))

    def least(self, shape: Shape) -> Least:
        """Returns seconds of exchanges and update, and bytes of weights, gradients and states, summed over all layers, that no
        layout of a shape undercuts: with each rank stepping a part of what it holds.
        """

        def least() -> Least:
            """Computes it: one exchange of all gradients together, and the update and states of what a rank steps itself."""
            counted = self.tables.trained.counted(None)
            held, owned = self._held_elements(shape, counted, every=True)
            offered = [
                self._per_layer(shape, counted) if bucket is None else self._fewest(shape, counted, bucket)
                for bucket in self._buckets
            ]
            kinds: tuple[Collective, ...] = ("reduce", "sum")  # each may have rates of its own
            costs = [self._exchange(shape, kind, *pieces).sum(axis=1) for pieces in offered for kind in kinds]
            exchanged_s = min(float(cost[BESIDE].sum()) for cost in costs)
            attended_s = min(float(cost[ATTENDED]) for cost in costs)
            state_bytes = self.steps.state_bytes(stepping(shape.offload))
            num_bytes = held.sum() * self.weight_bytes + owned.sum() * state_bytes
            return Least(exchanged_s, attended_s, self._update_s(owned.sum(), shape), num_bytes)

        return once(self._least, (shape.sizes.pp, shape.sizes.wp, str(shape.weights), str(shape.offload)), least)

    def _of_stages(self, shape: Shape, parts: ModelParts, every: bool, bucket: float | None) -> OfStages:
        """Returns seconds and bytes of each stage. every: whether each rank that holds an element alike steps a part of it.
        bucket: bytes of gradients that are summed at once; None for those of each layer.
        """
        counted = self.tables.trained.counted(parts)
        cut = counted, shape.sizes.wp, str(shape.weights), bucket, parts if bucket else None

        def exchanges() -> OfLayers:
            """Computes what does not depend on where optimizer states are, nor on the parts if there are no buckets."""
            pieces = once(
                self._pieces,
                cut,
                lambda: (
                    self._per_layer(shape, counted)
                    if bucket is None
                    else self._filled(shape, counted, _stages(shape, parts), bucket)
                ),
            )
            sums = self._exchange(shape, "reduce" if every else "sum", *pieces)
            gathers = self._exchange(shape, "gather" if every else None, *pieces)
            return OfLayers(sums, gathers, self._reduced_once(shape, counted))

        exchanged = once(self._exchanged, (shape.sizes.pp, every, *cut), exchanges)
        held, owned = map(parts.by_stage, self._held_elements(shape, counted, every=every))
        sums_s, gathers_s = (parts.by_stage(costs[BESIDE].sum(axis=0)) for costs in exchanged[:2])
        attended_s = parts.by_stage(exchanged.sums[ATTENDED] + exchanged.gathers[ATTENDED])
        state_bytes = self.steps.state_bytes(stepping(shape.offload))
        states = held * self.weight_bytes + owned * state_bytes + self._gathered_bytes(shape, counted, parts)
        # Values lie there as they were made until each moves to its place, beside gradients if other ranks hold the same.
        working, wide = (dtype.itemsize for dtype in dtypes(self.plan))
        is_alone = self.world == shape.sizes.pp
        start = held * (wide if is_alone else wide + self.weight_bytes - working)
        return OfStages(sums_s, gathers_s, attended_s, self._update_s(owned, shape), states, start, exchanged)

    def _held_elements(self, shape: Shape, counted: Counted, *, every: bool) -> tuple[np.ndarray, np.ndarray]:
        """Returns, for each layer, the elements that a rank holds of its weights, and those that it steps.

        every: whether each of those that hold an element alike steps a part of it.
        """
        sizes, cut = shape.sizes, self.tables.cut(shape, counted)
        ranks = self.world // sizes.pp
        shards, whole = cut / sizes.wp, counted.numel - cut
        held = shards + whole
        return held, (shards / (ranks // sizes.wp) + whole / ranks) if every else held

    def _exchange(self, shape: Shape, kind: Collective | None, shards: Pieces, whole: Pieces) -> Exchanged:
        """Returns the cost of exchanging each layer's gradients, or weights, [3, layers]: of shards among the ranks that hold
        the same one, and of weights that are whole among all of the stage. None: nothing is exchanged.
        """
        topology = Topology(self.world, shape.sizes.pp, wp=shape.sizes.wp)
        return self._of_pieces(kind, shards, topology, "wdp") + self._of_pieces(kind, whole, topology, "stage")

    def _per_layer(self, shape: Shape, counted: Counted) -> tuple[Pieces, Pieces]:
        """Returns the pieces of a reducer that sums layer by layer: of sharded weights, a rank's part of each, and of whole
        ones.
        """
        cut = self.tables.cut(shape, counted)
        return per_layer(-(-cut // shape.sizes.wp)), per_layer(counted.numel - cut)

    def _filled(
        self, shape: Shape, counted: Counted, stages: Sequence[Sequence[tuple[int, int]]], bucket: float
    ) -> tuple[Pieces, Pieces]:
        """Returns the pieces of a reducer that fills buckets of `bucket` bytes on each of `stages`."""
        most = bucket / DTYPES[self.plan.precision.gradients].itemsize
        shards, whole = (filled(sizes, stages, most) for sizes in self.tables.sizes(shape, counted))
        return shards, whole

    def _fewest(self, shape: Shape, counted: Counted, bucket: float) -> tuple[Pieces, Pieces]:
        """Returns the pieces of full buckets of `bucket` bytes, of which no cut into stages has fewer."""
        most = bucket / DTYPES[self.plan.precision.gradients].itemsize
        shards, whole = (fewest(sizes, most) for sizes in self.tables.sizes(shape, counted))
        return shards, whole

    def _reduced_once(self, shape: Shape, counted: Counted) -> Exchanged:
        """Returns the cost of reducing each layer's gradients over the ranks that share its weights, [3, layers], if that comes
        once a step; else zeros.
        """
        is_once = reduces(shape.weights) == "step"
        topology = Topology(self.world, shape.sizes.pp, wp=shape.sizes.wp)
        return self._of_pieces(
            "reduce" if is_once else None, per_layer(self.tables.cut(shape, counted)), topology, "wp"
        )

    def _of_pieces(self, kind: Collective | None, pieces: Pieces, topology: Topology, axis: str) -> Exchanged:
        """Returns the cost of each layer's pieces, [3, layers], exchanged one after another in groups of `axis`; zeros if
        `kind` is None. It is linear in bytes and in their number. All groups of all stages are taken as the slowest.
        """
        if kind is None or not pieces.counts.any():
            return np.zeros((len(NOTHING), len(pieces.counts)))
        itemsize = dtypes(self.plan)[0].itemsize if kind == "gather" else DTYPES[self.plan.precision.gradients].itemsize

        def priced() -> tuple[Exchanged, Exchanged]:
            """Computes the cost of a piece of no bytes, and that of each byte."""
            groups = all_groups(topology, axis, self.machine.links)
            slowest = max(groups, key=lambda ranks: sum(collective(kind, LARGE_BYTES, ranks, self.machine.links)))
            empty, large = (np.array(collective(kind, size, slowest, self.machine.links)) for size in (0, LARGE_BYTES))
            return empty, (large - empty) / LARGE_BYTES

        each, per_byte = once(self._priced, (kind, axis, topology), priced)
        return np.outer(each, pieces.counts) + np.outer(per_byte, pieces.elements * itemsize)

    def _update_s(self, owned: Owned, shape: Shape) -> Owned:
        """Returns the seconds of norm and update of so many elements, copies of offloaded states included."""
        return owned * self.steps.update_s(stepping(shape.offload))

    def _gathered_bytes(self, shape: Shape, counted: Counted, parts: ModelParts) -> Floats:
        """Returns the bytes of whole weights and whole gradients that each stage has for a while beside its shards; zeros
        without sharding.
        """
        if shape.weights is None:
            return np.zeros(shape.sizes.pp)
        cut, own = self.tables.cut(shape), self.tables.cut(shape, counted)
        working, gradient = dtypes(self.plan)[0].itemsize, DTYPES[self.plan.precision.gradients].itemsize
        after = np.append(cut[1:], 0)
        after[np.array(parts.bounds[1:]) - 1] = 0
        # whole at once are a layer that computes and the one after it in its part
        most = np.maximum.reduceat(cut + after, parts.starts)[parts.places].max(axis=0)
        whole = parts.by_stage(own) if reduces(shape.weights) == "step" else most
        return np.asarray(most * working + whole * gradient, dtype=np.float64)

    @cached_property
    def steps(self) -> StepCosts:
        """Returns what prices an element for the rank that steps it."""
        return StepCosts(self.plan, self.machine, num_states(self.plan))

    @cached_property
    def weight_bytes(self) -> int:
        """Returns the bytes of a parameter on every rank that has it: its working copy and its gradient."""
        return dtypes(self.plan)[0].itemsize + DTYPES[self.plan.precision.gradients].itemsize


def _stages(shape: Shape, parts: ModelParts) -> list[list[tuple[int, int]]]:
    """Returns the layers of each chunk of each stage."""
    return [parts.of_stage(stage) for stage in range(shape.sizes.pp)]

"""Tells what every layer of a model takes in a layout: seconds of its actions and bytes, as arrays over the layers.

    traced on one sample and on two, once per policy ──> any micro-batch, any slice ──> seconds, bytes
    measured, in some variants                       ──> its own, or the measure of the nearest
                                                         swaps of an attention      ──> added
                                                         gathers and reductions     ──> the longer of both

Weights are gathered, and gradients reduced, beside the computing of the layer before. So a layer takes the longer of its
computing and of its exchanges, but for what of these does not overlap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from sley_core.data.dataset import DataContext
from sley_core.data.factory import open_dataset
from sley_core.draft import DTYPES, draft_model, dtypes
from sley_core.records import copies_to_host
from sley_core.topology import Topology
from sley_estimate.layers.grown import ATTENTION
from sley_estimate.layers.nearest import NearestLayers
from sley_estimate.layers.once import once
from sley_estimate.layers.variants import LayerVariants, Variant
from sley_estimate.search.choices import choices_of
from sley_estimate.search.glance import reduces, refused
from sley_estimate.search.layer_columns import Floats, Integers, LayerColumns
from sley_estimate.search.layouts import Candidate, Shape, Sizes
from sley_estimate.search.parameters import Counted, Trained, num_elements
from sley_estimate.seconds.groups import Ranks, all_groups, slowest
from sley_estimate.seconds.host_copies import CopyKind, copy_cost
from sley_estimate.seconds.layer_seconds import LayerSeconds
from sley_estimate.seconds.links import NOTHING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from sley_core.errors import SleyError
    from sley_core.model.layers import Model
    from sley_core.plan.plan import Plan
    from sley_core.protocols import Collective
    from sley_estimate.layers.operators import LayerWork, Operator
    from sley_estimate.machine.tables import MachineFile
    from sley_estimate.search.choices import Choice


class LayerTables:
    """Makes the tables of a plan's model for all layouts of a world; a layer is traced when a layout first asks for it.

    trained: parameters of its layers.
    """

    def __init__(self, plan: Plan, world: int, machine: MachineFile) -> None:
        self.plan = plan
        self.world = world
        self.machine = machine
        self.dataset = open_dataset(plan.data, DataContext(plan.run.seed, "train"))
        self.model: Model = draft_model(plan, self.dataset.info)
        self.trained = Trained(self.model.layers)
        self.variants = LayerVariants(plan, self.model, self.dataset)
        self._nearest = NearestLayers(self.variants, machine, choices_of(plan))
        self._tables: dict[Any, LayerColumns | SleyError] = {}
        self._exchanges: dict[tuple[int, str], tuple[Floats, Floats] | SleyError] = {}
        self._cut: dict[tuple[str, Counted | None], Integers | SleyError] = {}
        self._cut_ids: dict[str, frozenset[int] | SleyError] = {}
        self._sizes: dict[Any, tuple[list[list[float]], list[list[float]]] | SleyError] = {}

    def keys(self, policy: Choice) -> list[str]:
        """Returns a key for each layer under a policy; equal for layers that take as long and as much memory as each other."""
        return self.variants.keys(Variant(policy, 1))

    def of(self, shape: Shape) -> LayerColumns:
        """Returns seconds and bytes of every layer in a shape; made once for all shapes that differ in nothing that matters to
        layers.

        Raises PlanError for layers that cannot be counted, and for a machine file that lacks what they need.
        """
        sizes = shape.sizes
        key = sizes.sp, sizes.wp, sizes.micro_size, str(shape.activations), str(shape.weights), str(shape.attention)
        return once(self._tables, key, lambda: self._sharded(shape) if sizes.wp > 1 else self._whole(shape))

    def cut(self, shape: Shape, counted: Counted | None = None) -> Integers:
        """Returns how many trained elements of each layer the shape's weight communicator shards: int64 [layers]; zeros without
        one. counted: those that count; None for all that the layer uses.
        """
        if shape.weights is None:
            return np.zeros(len(self.trained.every), dtype=np.int64)

        def cut() -> Integers:
            ids = self._ids_cut(shape)
            held = counted.held if counted else self.trained.every
            return num_elements([[one for one in some if id(one) in ids] for some in held])

        return once(self._cut, (str(shape.weights), counted), cut)

    def sizes(self, shape: Shape, counted: Counted) -> tuple[list[list[float]], list[list[float]]]:
        """Returns, by layer, the elements that a rank has of the gradient of each `counted` parameter: first of those that are
        sharded, then of the others.
        """

        def sizes() -> tuple[list[list[float]], list[list[float]]]:
            """Computes it; a shard has 1/wp of the elements."""
            ids, wp = self._ids_cut(shape) if shape.weights else frozenset[int](), shape.sizes.wp
            shards = [[one.numel() / wp for one in some if id(one) in ids] for some in counted.held]
            whole = [[float(one.numel()) for one in some if id(one) not in ids] for some in counted.held]
            return shards, whole

        return once(self._sizes, (counted, shape.sizes.wp, str(shape.weights)), sizes)

    def _sharded(self, shape: Shape) -> LayerColumns:
        """Returns the table of a shape that shards weights, from that of whole ones: a layer takes the longer of its computing
        and of those of its exchanges that run beside it, and then the rest of them.
        """
        whole = self.of(replace(shape, sizes=replace(shape.sizes, wp=1), weights=None))
        gather, reduce = once(self._exchanges, (shape.sizes.wp, str(shape.weights)), lambda: self._of_shards(shape))
        added = np.where(whole.is_measured, 0.0, self._added_s(shape))
        return replace(
            whole,
            forward=_beside(whole.forward, gather),
            backward=_beside(np.maximum(whole.backward + added, 0.0), gather + reduce),
            input_gradient=_beside(whole.input_gradient, gather),
            weight_gradient=_beside(np.maximum(whole.weight_gradient + added, 0.0), reduce),
        )

    def _added_s(self, shape: Shape) -> Floats:
        """Returns the seconds, by layer, by which adding up the gradients of shards takes longer than adding up whole ones
        (negative if shorter): sums of rows are added too. Products of the gradients' own dtype are written where they are
        reduced, and not added there.
        """
        cut, (working, _) = self.cut(shape), dtypes(self.plan)
        gradients = DTYPES[self.plan.precision.gradients]
        rows = cut / shape.sizes.wp if reduces(shape.weights) != "step" else np.zeros(len(cut))
        written = cut if working == gradients and reduces(shape.weights) != "step" else 0
        return np.asarray((rows - written) * 3 * gradients.itemsize / self.machine.device.memory_bandwidth)

    def _of_shards(self, shape: Shape) -> tuple[Floats, Floats]:
        """Returns the seconds of the gather of each layer's weights, and of the reduction of its gradients per micro-batch
        (zeros if that comes once a step); both [2, layers]: what runs beside computing, and what does not.
        """
        cut = self.cut(shape)
        groups = all_groups(Topology(self.world, wp=shape.sizes.wp), "wp", self.machine.links)
        gather = self._exchanged("gather", cut * dtypes(self.plan)[0].itemsize, groups)
        reduce = self._exchanged("reduce", cut * DTYPES[self.plan.precision.gradients].itemsize, groups)
        return gather, np.zeros_like(reduce) if reduces(shape.weights) == "step" else reduce

    def _exchanged(self, kind: Collective, sizes: Integers, groups: Sequence[Ranks]) -> Floats:
        """Returns the seconds of an exchange of `sizes` bytes for each layer in the slowest of `groups`, [2, layers]: what runs
        beside computing, and what does not. Zeros where there are no bytes.
        """
        costs = {size: slowest(kind, int(size), groups, self.machine.links) if size else NOTHING for size in set(sizes)}
        known = {size: (cost.latency_s + cost.work_s, cost.attended_s) for size, cost in costs.items()}
        return np.array([known[size] for size in sizes]).T

    def _whole(self, shape: Shape) -> LayerColumns:
        """Returns the table of a shape whose weights are whole: measured or counted seconds of layers, with the swaps of
        attention over slices, and copies of a policy that moves what layers save to the host.
        """
        sizes = shape.sizes
        variant = Variant(shape.activations, sizes.micro_size, sizes.sp)
        works = self.variants.works(variant)
        priced = self._nearest.priced(variant, works, shape.attention)
        known: dict[tuple[int, LayerSeconds], LayerSeconds] = {}
        found = []
        for work, (alone, _) in zip(works, priced, strict=True):
            if (id(work), alone) not in known:
                known[id(work), alone] = self._swapped(alone, work, sizes.sp) if sizes.sp > 1 else alone
            found.append(known[id(work), alone])
        seconds = np.array(
            [[of.forward, of.backward, of.input_gradient, of.weight_gradient] for of in found], dtype=np.float64
        )
        kept = [work.kept_bytes for work in works]
        output, passing = ([getattr(work, name) for work in works] for name in ("output_bytes", "passing_bytes"))
        if copies_to_host(shape.activations.record):
            self._copy(shape, seconds, kept, passing)
        waiting, handed, beside = (np.array(some, dtype=np.int64) for some in (kept, output, passing))
        is_measured, host_s = [source != "counted" for _, source in priced], [of.host_ways_s for of, _ in priced]
        forward, backward, through, rest = seconds.T
        return LayerColumns(
            forward, backward, through, rest, waiting, handed, beside, np.array(is_measured), np.array(host_s).T
        )

    def _copy(self, shape: Shape, seconds: Floats, kept: list[int], passing: list[int]) -> None:
        """Changes `seconds`, [layers, 4], and bytes for a policy that copies what chosen layers save to the host: copies count
        beside the layer's own computing on CUDA, and behind it on a CPU; nothing of these layers waits on the device, and their
        backwards have it there. Raises PlanError "not-at-a-glance" for a policy that does not name these layers.
        """
        names = getattr(self.variants.policy(shape.activations), "names", None)
        if names is None:
            raise refused(f"copies of `{shape.activations}`, which does not say of which layers,")
        runs_ahead = self.machine.device.kind == "cuda"
        for at, layer in enumerate(self.model.layers):
            if layer.name in names:
                there_s, back_s = (sum(copy_cost(kind, kept[at], self.machine)) for kind in get_args(CopyKind))
                forward, backward, through, rest = seconds[at]
                seconds[at] = (
                    (max(forward, there_s), max(backward, back_s), max(through, back_s), rest)
                    if runs_ahead
                    else (forward + there_s, backward + back_s, through + back_s, rest)
                )
                kept[at], passing[at] = 0, passing[at] + kept[at]

    def _swapped(self, seconds: LayerSeconds, work: LayerWork, sp: int) -> LayerSeconds:
        """Returns the seconds of a layer with the swaps of its attentions over `sp` ranks: in the forward, in each backward,
        and again where a backward runs attention again.
        """
        there, again = self._swaps_s(work.forward, sp), self._swaps_s(work.recompute, sp)
        return LayerSeconds(
            seconds.forward + there,
            seconds.backward + there + again,
            seconds.input_gradient + there + again,
            seconds.weight_gradient,
        )

    def _swaps_s(self, operators: Iterable[Operator], sp: int) -> float:
        """Returns the seconds of the two swaps around each attention in `operators`: of what it reads, and of
        what it writes.
        """
        each = [one.num_bytes for one in operators if one.name == ATTENTION]
        groups = all_groups(Topology(self.world, sp=sp), "sp", self.machine.links) if each else []
        return sum(2 * sum(slowest("swap", num_bytes // 2, groups, self.machine.links)) for num_bytes in each)

    def _ids_cut(self, shape: Shape) -> frozenset[int]:
        """Returns the `id`s of the parameters that the shape's weight communicator shards."""
        return once(self._cut_ids, str(shape.weights), lambda: self._cut_by_communicator(shape))

    def _cut_by_communicator(self, shape: Shape) -> frozenset[int]:
        """Builds the shape's weight communicator for two ranks and asks it, as a run does, which parameters it shards; returns
        their `id`s.
        """
        plan = Candidate(replace(shape, sizes=Sizes(1, 1, 2, 1), attention=None), None, None).plan(self.plan, 2)
        assert plan.weights is not None, shape
        communicator = plan.weights.build()
        communicator.prepare(self.model.layers)
        places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
        for layer in self.model.layers:
            for module in layer.module.modules():
                for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                    places[id(parameter)].append((module, name))
        return frozenset(key for key, held in places.items() if communicator.cuts(held) is not None)


def _beside(computing: Floats, exchanged: Floats) -> Floats:
    """Returns the seconds of layers with an exchange, [2, layers], beside them: the longer of computing and of its first row,
    and then its second row.
    """
    overlapping, attended = exchanged
    return np.asarray(np.maximum(computing, overlapping) + attended)

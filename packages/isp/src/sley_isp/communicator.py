"""`isp.communicator`: linears and embeddings of any model, sharded over `wp`, gathered just before they are used.

LayerCaller ──> layer ──> linear's site ──> use ──> Prefetch decides ──> gathers start, buffers go back
                                                       ^
Executor ──> begin, during(action) ────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sley_core.api.actions import GRADIENT_KINDS, Action, Kind
from sley_core.api.comm import GATHER, SentBytes
from sley_core.api.model import ForwardPatch
from sley_core.api.parts import Handover
from sley_core.api.weights import AXIS, stand_in
from sley_core.protocols import WeightCommunicator
from sley_isp.counts import Tally
from sley_isp.embedding_columns import Columns, ShardedEmbedding, check_tables
from sley_isp.prefetch import Decision, PrefetchPolicy
from sley_isp.reductions import GradientBuckets, Reductions
from sley_isp.sites import Site, embedding_gradient, is_plain, linear_gradient
from sley_isp.tokens import PublishedShards
from sley_isp.units import Gathered, Launches, Unit, check_points, sharded_modules
from sley_isp.vocabulary_head import VocabularyHead, find_head

if TYPE_CHECKING:
    from sley_core.api.model import Layer
    from sley_core.api.parts import Param, Parts, Phase
    from sley_core.protocols import MemoryPool
    from sley_isp.config import CommunicatorConfig

BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRADIENT)


class Communicator(WeightCommunicator):
    """Gathers the sharded weights of this rank and reduces their gradients; `tally` counts exchanges and peak memory."""

    pool: MemoryPool
    reductions: Reductions
    columns: Columns
    tally: Tally

    def __init__(self, config: CommunicatorConfig) -> None:
        self.config = config
        self.prefetch = PrefetchPolicy(config.ahead if config.overlap else 0)
        self.sites: list[Site] = []
        self.units: list[Unit] = []
        self._gathered: dict[Unit, Gathered] = {}
        self._action: Action | None = None
        self._at = self._final = -1
        self._drains: set[int] = set()
        self._head_place: tuple[str, str] | None = None
        self._head: nn.Module | None = None
        self.launches = Launches(config.launch, self._launch)
        self._patches = ExitStack()

    def prepare(self, layers: Sequence[Layer]) -> None:
        """Finds the modules that the config treats specially; raises PlanError if the model has none that fit."""
        if self.config.head == "vocabulary":
            self._head_place = layers[-1].name, find_head(layers)
        if self.config.embedding == "hidden":
            check_tables(layers)
        check_points(layers, self.config.launch)

    def cuts(self, places: Sequence[tuple[nn.Module, str]]) -> int | None:
        """Returns dim 1 for tables cut along the hidden dim, dim 0 for other plain linears and embeddings, else None."""
        if not all(is_plain(module, attribute) for module, attribute in places):
            return None
        return int(self.config.embedding == "hidden" and isinstance(places[0][0], nn.Embedding))

    def attach(self, parts: Parts) -> None:
        """Patches the forwards of all sharded modules and puts stand-ins for their weights; undoes all if it raises."""
        self._parts = parts
        self._group = parts.groups[AXIS]
        self._waits = parts.waits
        self._published = PublishedShards(self._group, parts.waits.is_due)
        self._queue = parts.queue
        self.pool = parts.pool(self.config.pool)
        bound = self.config.bound if self.config.overlap else 0
        once = self.config.reduce == "step"
        sent = SentBytes()
        self.reductions = Reductions(bound, parts.store, self.pool, self._group, sent, once=once)
        self.columns = Columns(
            self._group, parts.store, self._queue, self._before_lookup, self._is_overlapping, sent, parts.world.device
        )
        self.tally = Tally(self.prefetch, self.reductions, self.columns, self.pool, sent)
        self.buckets = GradientBuckets(fused=self.config.fused, once=once)
        try:
            for layer in parts.layers:
                if self._head_place is not None and self._head_place[0] == layer.name:
                    self._head = layer.module.get_submodule(self._head_place[1])
            for layer in parts.layers:
                self._take(layer)
            for site in self.sites:
                self.buckets.add(site)
            stand_in(parts.registry)
        except BaseException:
            self.detach()
            raise

    def begin(self, actions: Sequence[Action], phase: Phase) -> None:
        """Starts a step: drops leftovers of a failed one and publishes the shards, together with all ranks of `wp`."""
        self._action = None
        actions = [action for action in actions if action.kind is not Kind.CHUNK_DONE]  # nothing runs in these
        last = {action.chunk: at for at, action in enumerate(actions) if action.kind in GRADIENT_KINDS}
        # And after the action before: the last gradient action must not start with earlier reductions in flight.
        self._drains = {at - before for at in last.values() for before in (0, 1)}
        self._at = -1
        self._final = len(actions) - 1
        passes = [(phase, action.kind, action.chunk) for action in actions if action.kind is not Kind.WEIGHT_GRADIENT]
        self.prefetch.begin(passes)
        self._drop(list(self._gathered))
        self._published.end()
        self.reductions.forget()
        self.columns.forget()
        self.tally.begin(actions, phase)
        if self.config.overlap:
            self._published.begin(self.units)

    @contextmanager
    def during(self, action: Action) -> Iterator[None]:
        """Runs `action` within the block; a chunk's last gradient action ends only when its reductions are finished."""
        self._at += 1
        is_pass = action.kind is not Kind.WEIGHT_GRADIENT
        if is_pass:
            self.prefetch.enter()
        self._action = action
        try:
            yield
        finally:
            self._action = None
        self.reductions.flush()
        if is_pass:
            self._apply(self.prefetch.leave())
        self.columns.leave(everything=self._at in self._drains)
        if self._at in self._drains:
            self.reductions.finish()
        if self._at == self._final:
            self._published.end()
            self.tally.end()

    def detach(self) -> None:
        """Restores the modules' own forwards; stand-ins stay."""
        self._published.forget()
        self._patches.close()
        self.launches.close()
        self.sites.clear()

    def counts(self) -> dict[str, float]:
        """Returns the numbers of the last step and the peaks, as `protocols.Counts`."""
        return self.tally.report()

    def is_recomputing(self) -> bool:
        """Returns whether a forward that runs now is within a backward action, as in recomputation."""
        return self._action is not None and self._action.kind in BACKWARDS

    def use(self, unit: Unit, own: Sequence[Param], *, pins: int, launches: bool) -> Gathered:
        """Returns the weights of `unit`, maybe still in flight, for a use of `own`; starts prefetches if `launches`."""
        if self._action is None:
            return self._gather(unit)
        known = self._gathered.get(unit)
        if known is not None and known.is_older(own):
            self._drop([unit])
            self.prefetch.forget(unit)
        self._apply(self.prefetch.use(unit, pins=pins, launches=launches))
        return self._gathered[unit]

    def done(self, gathered: Gathered) -> None:
        """Ends a use: outside an action frees the weights and waits for the peers; otherwise the prefetch policy frees them."""
        if self._action is None:
            gathered.release()
            gathered.wait_sent()

    def _apply(self, decision: Decision) -> None:
        """Drops and gathers the units of `decision`, in this order."""
        self._drop(decision.drop)
        for unit in decision.gather:
            assert isinstance(unit, Unit), unit
            self._gathered[unit] = self._gather(unit)

    def _gather(self, unit: Unit) -> Gathered:
        """Starts to gather `unit`, after the waits of its layer; blocks until the weights are here unless `overlap` is set."""
        has_waited = self._waits.wait_for(unit.layer)
        is_unchanged = self._action is not None and not has_waited
        source = self._published.source(unit) if is_unchanged else self._group.transport(GATHER)
        gathered = Gathered(unit, self.pool, source, self._group.size)
        if self._action is not None:
            self.tally.gathered(unit, gathered)
        if not self.config.overlap:
            gathered.wait()
        return gathered

    def _drop(self, units: Sequence[object]) -> None:
        """Returns the buffers of `units` to the pool; their peers have received this rank's shards when the step has ended."""
        for unit in units:
            assert isinstance(unit, Unit), unit
            gathered = self._gathered.pop(unit)
            gathered.release()
            self.tally.dropped(gathered)
            self._published.leaving.append(gathered)

    def _take(self, layer: Layer) -> None:
        """Puts the sharded modules of `layer` into units and patches their forwards."""
        sites: list[Site] = []
        together = Unit(layer.name, layer.name)
        known = [one.module for one in self.sites] + [one.module for one in self.columns.tables]
        for name, module, held in sharded_modules(layer, self._parts.registry, known):
            for param in held.values():
                self._parts.store.expect_products(param)
            if isinstance(module, nn.Embedding) and self.config.embedding == "hidden":
                table = ShardedEmbedding(self.columns, name, layer.name, module, held["weight"])
                self.columns.tables.append(table)
                self._patch(module, table.forward)
                continue
            is_alone = self.config.unit == "module" or module is self._head
            unit = Unit(name, layer.name) if is_alone else together
            unit.params += [param for param in held.values() if param not in unit.params]
            if unit not in self.units:
                self.units.append(unit)
            site = Site(self, unit, module, held.get("weight"), held.get("bias"))
            site.fuses = not self._parts.store.reduction.fixed_order
            site.sink = Handover(partial(self._reduce, site), self._queue)
            if module is self._head:
                self._share_vocabulary(site)
            else:
                sites.append(site)
                self._patch(module, site.forward)
        self.launches.take(layer, together, sites)
        self.sites += sites

    def _patch(self, module: nn.Module, forward: Callable[[Tensor], Any]) -> None:
        self._patches.callback(ForwardPatch(module, forward).undo)

    def _launch(self, unit: Unit) -> None:
        """Starts prefetches before a launch point of a layer runs, as a use of one of the layer's weights would."""
        if self._action is not None:
            self.use(unit, (), pins=0, launches=True)

    def _share_vocabulary(self, site: Site) -> None:
        """Patches the head's forward: within an action its weight is not gathered; outside of one it is an ordinary site."""
        tokens, store = self.columns.tokens, self._parts.store
        head = VocabularyHead(site, tokens, store, self.pool, self._queue, lambda: self._action is not None)
        self._patch(site.module, head.forward)
        self.sites.append(site)

    def _is_overlapping(self) -> bool:
        return self.config.overlap and self._action is not None

    def _before_lookup(self, table: ShardedEmbedding) -> None:
        """Waits for the table's layer and starts prefetches of later units; the table itself is not gathered."""
        self._waits.wait_for(table.layer)
        if self._is_overlapping():
            self._apply(self.prefetch.pass_by())

    @torch.no_grad()
    def _reduce(self, site: Site, rows: Tensor, inputs: Tensor) -> None:
        """Adds the gradients of `site`'s weights, from `rows` (output gradient) and `inputs`, to their buckets."""
        write = embedding_gradient if isinstance(site.module, nn.Embedding) else linear_gradient
        for param in site.trained:
            self._parts.store.check_open(param)  # raises before anything is leased or sent
        for param in site.trained:
            self.reductions.add(*self.buckets.of(site, param), param, partial(write, site, param, rows, inputs))
        if self._action is None:
            self.reductions.flush(everything=True)
            self.reductions.finish()
        elif not self.buckets.fused and not self.buckets.once:
            self.reductions.flush()

"""`isp.communicator`: linears and embeddings of any model, sharded over `wp` and all-gathered just before they are used.

LayerCaller ──> layer ──> ShardedModule.forward ──> unshard ──> PrefetchPolicy decides ──> all-gathers start, buffers go back
                                                       ^
Executor ──> begin, during(action) ────────────────────┘
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sley_core.api.actions import Action, Kind
from sley_core.api.comm import SentBytes
from sley_core.api.model import ForwardPatch
from sley_core.api.parts import Handover, Phase
from sley_core.api.plan import suggestion
from sley_core.api.weights import StandIn
from sley_core.errors import PlanError
from sley_core.protocols import WeightCommunicator
from sley_isp.config import ANYWHERE
from sley_isp.embedding_columns import ColumnTables, TokenGather, check_tables
from sley_isp.param_group import ParamGroup, PublishedShards, Unsharded
from sley_isp.prefetch import NOTHING, Decision, PrefetchPolicy
from sley_isp.reduce_scatter import GradientReducer
from sley_isp.sharded_module import ShardedModule, is_plain
from sley_isp.vocabulary_head import VocabularyHead, find_head

if TYPE_CHECKING:
    from sley_core.api.model import Layer
    from sley_core.api.parts import Param, Parts
    from sley_core.protocols import MemoryPool
    from sley_isp.config import CommunicatorConfig

BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRADIENT)

WARM_UP = 2
"""Steps after which a pool should allocate no more: in the first, the order of gathers is not known yet."""

MOST_NAMES = 20
"""How many names a message lists."""


class Counters:
    """Counts exchanges, bytes and peaks of one rank, for `protocols.Counts`. sent: what all parts send in a step."""

    def __init__(self) -> None:
        self.sent = SentBytes()
        self._totals = Counter(gathers=0, demand_gathers=0, gathered_bytes=0, reductions=0, reduced_bytes=0)
        self._now: Counter[str] = Counter()
        self._peaks = Counter(unsharded_groups=0, unsharded_bytes=0, full_gradients=0, full_gradient_bytes=0)
        self._before = self._totals.copy()
        self._num_steps = 0
        self._report: dict[str, float] = {}

    def add(self, name: str, number: int) -> None:
        """Adds to a total, whose difference over a training step is reported as `{name}_per_step`."""
        self._totals[name] += number

    def hold(self, name: str, number: int) -> None:
        """Adds to a number that exists now, whose largest value is reported as `most_{name}`."""
        self._now[name] += number
        self._peaks[name] = max(self._peaks[name], self._now[name])

    def begin(self) -> None:
        """Begins a step or an evaluation."""
        self.sent.begin_step()
        self._before = self._totals.copy()

    def end_step(self, num_allocations: int) -> None:
        """Ends a training step. num_allocations: of the pool since the beginning."""
        self.sent.end_step()
        self._num_steps += 1
        self._report = {f"{name}_per_step": total - self._before[name] for name, total in self._totals.items()}
        self._report |= self.sent.counts()
        if self._num_steps <= WARM_UP:
            self._warm_allocations = num_allocations
        if self._num_steps >= WARM_UP:
            self._report[f"allocations_after_step_{WARM_UP}"] = num_allocations - self._warm_allocations

    def report(self) -> dict[str, float]:
        """Returns the numbers of the last training step, and the peaks of all steps and evaluations."""
        return self._report | {f"most_{name}": number for name, number in self._peaks.items()}


class Communicator(WeightCommunicator):
    """Unshards the weights of this rank when they are used, and reduces their gradients."""

    pool: MemoryPool
    reducer: GradientReducer
    columns: ColumnTables

    def __init__(self, config: CommunicatorConfig) -> None:
        self.config = config
        self.prefetch = PrefetchPolicy(config.ahead if config.overlap else 0)
        self.counters = Counters()
        self.modules: list[ShardedModule] = []
        self.groups: list[ParamGroup] = []
        self._unsharded: dict[ParamGroup, Unsharded] = {}
        self._action: Action | None = None
        self._phase = Phase.TRAIN
        self._at = self._final = -1
        self._drains: set[int] = set()
        self._head_name: tuple[str, str] | None = None
        self._undo = ExitStack()

    def prepare(self, layers: Sequence[Layer]) -> None:
        """Finds the modules that the config treats specially; raises PlanError if the model has none that fit."""
        if self.config.head == "vocabulary":
            self._head_name = layers[-1].name, find_head(layers)
        if self.config.embedding == "hidden":
            check_tables(layers)
        if self.config.launch != ANYWHERE:
            check_prefetch_points(layers, self.config.launch)

    def shard_dim(self, places: Sequence[tuple[nn.Module, str]]) -> int | None:
        """Returns dim 1 for tables cut along the hidden dim, dim 0 for other plain linears and embeddings, else None."""
        if not all(is_plain(module, attribute) for module, attribute in places):
            return None
        return int(self.config.embedding == "hidden" and isinstance(places[0][0], nn.Embedding))

    def attach(self, parts: Parts) -> None:
        """Patches the forwards of all sharded modules and puts stand-ins for their weights; undoes all if it raises."""
        config = self.config
        self._parts = parts
        self._group = parts.groups["wp"]
        self._published = PublishedShards(self._group, parts.waits.is_due)
        self.pool = parts.pool(config.pool)
        bound, once = config.bound if config.overlap else 0, config.reduce == "step"
        self.reducer = GradientReducer(bound, parts.store, self.pool, self._group, self.counters, once=once)
        self._tokens = TokenGather(self._group, parts.world.device, self.counters)
        self.columns = ColumnTables(self._tokens, parts.store, parts.queue, self._before_lookup, self._is_overlapping)
        try:
            for layer in parts.layers:
                self._shard(layer)
            StandIn.replace(parts.registry)
        except BaseException:
            self.detach()
            raise

    def _shard(self, layer: Layer) -> None:
        """Puts the sharded parameters of `layer` into groups and patches the forwards of their modules."""
        head_layer, head_name = self._head_name or ("", "")
        head: Any = layer.module.get_submodule(head_name) if head_layer == layer.name else None
        layer_group = ParamGroup(layer.name, layer.name)
        modules: list[ShardedModule] = []
        known = {sharded.module for sharded in self.modules} | {table.module for table in self.columns.tables}
        for name, module in layer.module.named_modules(prefix=layer.name):
            attributes = [] if module in known else [key for key, value in module._parameters.items() if value is not None]
            params = {attribute: self._parts.registry[f"{name}.{attribute}"] for attribute in attributes}
            params = {attribute: param for attribute, param in params.items() if param.shard is not None}
            for param in params.values():
                self._parts.store.expect_products(param)
            if not params:
                continue
            if isinstance(module, nn.Embedding) and self.config.embedding == "hidden":
                self._patch(module, self.columns.add(name, layer.name, module, params["weight"]).forward)
                continue
            group = ParamGroup(name, layer.name) if self.config.unit == "module" or module is head else layer_group
            group.params += [param for param in params.values() if param not in group.params]
            if group not in self.groups:
                self.groups.append(group)
            sharded = ShardedModule(self, group, module, params, fuses=not self._parts.store.reduction.fixed_order)
            sharded.sink = Handover(partial(self._reduce, sharded), self._parts.queue)
            self.reducer.register(group, sharded.params)
            self.modules.append(sharded)
            if module is head:
                self._patch(module, VocabularyHead(sharded, self._tokens, self._parts, self.pool).forward)
            else:
                modules.append(sharded)
                self._patch(module, sharded.forward)
        points = set(prefetch_points(layer, self.config.launch) if layer_group.params else ())
        for sharded in modules:
            sharded.prefetches = not points or sharded.module in points
        for point in points - {sharded.module for sharded in modules}:
            self._undo.callback(point.register_forward_pre_hook(partial(self._before_point, layer_group)).remove)

    def _patch(self, module: nn.Module, forward: Callable[[Tensor], Any]) -> None:
        self._undo.callback(ForwardPatch(module, forward).undo)

    def detach(self) -> None:
        """Restores the modules' own forwards; stand-ins stay."""
        self._published.discard()
        self._undo.close()
        self.modules.clear()

    def begin(self, actions: Sequence[Action], phase: Phase) -> None:
        """Starts a step: discards leftovers of a failed one and publishes the shards, together with all ranks of `wp`."""
        self._action = None
        self._phase = phase
        actions = [action for action in actions if action.kind is not Kind.CHUNK_DONE]  # nothing runs in these
        last = {action.chunk: at for at, action in enumerate(actions) if action.kind.makes_gradients}
        # And after the action before: the last gradient action must not start with earlier reductions in flight.
        self._drains = {at - before for at in last.values() for before in (0, 1)}
        self._at = -1
        self._final = len(actions) - 1
        passes = [(phase, action.kind, action.chunk) for action in actions if action.kind is not Kind.WEIGHT_GRADIENT]
        self.prefetch.begin(passes)
        self._apply(Decision(reshard=list(self._unsharded)))
        self._published.end()
        self.reducer.discard()
        self.columns.discard()
        self.counters.begin()
        if self.config.overlap:
            self._published.begin(self.groups)

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
        self.reducer.flush()
        if is_pass:
            self._apply(self.prefetch.leave())
        self.columns.leave(everything=self._at in self._drains)
        if self._at in self._drains:
            self.reducer.finish()
        if self._at == self._final:
            self._published.end()
            if self._phase is Phase.TRAIN:
                self.counters.end_step(getattr(self.pool, "num_allocations", 0))

    def counts(self) -> dict[str, float]:
        """Returns the numbers of the last step and the peaks, as `protocols.Counts`."""
        return self.counters.report()

    @property
    def is_running(self) -> bool:
        """Whether an action of a step or an evaluation runs; outside of one a program calls the model by hand."""
        return self._action is not None

    @property
    def is_recomputing(self) -> bool:
        """Whether a forward that runs now is within a backward action, as in recomputation."""
        return self._action is not None and self._action.kind in BACKWARDS

    @contextmanager
    def unshard(self, group: ParamGroup, params: Sequence[Param], *, keep: int = 0, prefetches: bool) -> Iterator[Unsharded]:
        """Unshards `group` for a use of `params` within the block, which must call `Unsharded.wait` before it reads weights.

        keep: +1 keeps the group for the backward after a recomputation, -1 ends that. prefetches: whether prefetches may start.
        Within an action the prefetch policy decides when the group is resharded, else it is at the end of the block.
        """
        if self._action is None:
            unsharded = self._all_gather(group)
            try:
                yield unsharded
            finally:
                unsharded.reshard()
                unsharded.wait_sent()
            return
        gathered = self._unsharded.get(group)
        if gathered is not None and gathered.is_stale(params):
            self._apply(Decision(reshard=[group]))
            self.prefetch.forget(group)
        decision = self.prefetch.use(group, keep=keep, prefetches=prefetches)
        if decision is not NOTHING:
            self.counters.add("demand_gathers", decision.unshard[:1] == [group])
            self._apply(decision)
        yield self._unsharded[group]

    def _apply(self, decision: Decision) -> None:
        """Reshards and unshards the groups of `decision`, in this order."""
        for group in decision.reshard:
            assert isinstance(group, ParamGroup), group
            unsharded = self._unsharded.pop(group)
            unsharded.reshard()
            self._published.resharded.append(unsharded)  # peers have received the shards when the step has ended
            self.counters.hold("unsharded_groups", -1)
            self.counters.hold("unsharded_bytes", -unsharded.num_bytes)
        for group in decision.unshard:
            assert isinstance(group, ParamGroup), group
            unsharded = self._unsharded[group] = self._all_gather(group)
            self.counters.add("gathers", 1)
            self.counters.add("gathered_bytes", unsharded.num_received_bytes)
            self.counters.sent.add_message(unsharded.num_received_bytes)  # each rank sends as much as it receives
            self.counters.hold("unsharded_groups", 1)
            self.counters.hold("unsharded_bytes", unsharded.num_bytes)

    def _all_gather(self, group: ParamGroup) -> Unsharded:
        """Starts the all-gather of `group`, after the waits of its layer; without `overlap` blocks until it is done."""
        has_waited = self._parts.waits.wait_for(group.layer)
        is_unchanged = self._action is not None and not has_waited
        source = self._published.source(group) if is_unchanged else self._group.transport("gather")
        unsharded = Unsharded(group, self.pool, source, self._group.size)
        if not self.config.overlap:
            unsharded.wait()
        return unsharded

    def _before_point(self, group: ParamGroup, *_: Any) -> None:
        """Starts prefetches before a prefetch point that is not sharded, as a use of the layer's weights would."""
        if self._action is not None:
            with self.unshard(group, (), prefetches=True):
                pass

    def _is_overlapping(self) -> bool:
        return self.config.overlap and self._action is not None

    def _before_lookup(self, layer: str) -> None:
        """Waits for the weights of `layer` and starts prefetches of later groups; a table cut by columns is not gathered."""
        self._parts.waits.wait_for(layer)
        if self._is_overlapping():
            self._apply(self.prefetch.before_first())

    @torch.no_grad()
    def _reduce(self, module: ShardedModule, rows: Tensor, inputs: Tensor) -> None:
        """Adds the gradients of `module`'s weights, from `rows` (output gradient) and `inputs`, to their buckets."""
        for param in module.trained:
            self._parts.store.check_open(param)  # raises before anything is leased or sent
        for param in module.trained:
            self.reducer.add(module.group, param, partial(module.write_gradient, param, rows, inputs))
        if self._action is None:
            self.reducer.flush(everything=True)
            self.reducer.finish()


def prefetch_points(layer: Layer, pattern: str) -> list[nn.Module]:
    """Returns the modules of `layer` whose names within it match; an empty list if any sharded module may start prefetches."""
    if pattern == ANYWHERE:
        return []
    return [module for name, module in _callable(layer).items() if fnmatchcase(name, pattern)]


def check_prefetch_points(layers: Sequence[Layer], pattern: str) -> None:
    """Raises PlanError "launch-point" if no layer has a module that matches."""
    if any(prefetch_points(layer, pattern) for layer in layers):
        return
    names = list(dict.fromkeys(name for layer in layers for name in _callable(layer)))
    listed = ", ".join(f"`{name}`" for name in names[:MOST_NAMES]) or "none"
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    raise PlanError(
        "launch-point",
        f"`{pattern}` matches no module of any layer; within layers there are {listed}{more}",
        path=("weights", "launch"),
        hint=suggestion(pattern, names, "write a module's name within its layer, or a pattern of such names"),
    )


def _callable(layer: Layer) -> dict[str, nn.Module]:
    """Returns the modules of `layer` with a forward, by their names within it; containers such as ModuleList are left out."""
    modules = layer.module.named_modules()
    return {name: module for name, module in modules if name and type(module).forward is not nn.Module.forward}

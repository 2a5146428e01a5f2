"""`isp.communicator`: shards the parameters of any model over `wp`, and all-gathers them just before each use.

LayerCaller ──> layer ──> ShardedModule.forward ──> unshard ──> PrefetchPolicy decides ──> all-gathers start, buffers are freed
                                                       ^
Executor ──> begin, wrap_action ───────────────────────┘
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from sley_isp.chunked_heads import ChunkedVocabularyHead, GatheredHead
from sley_isp.config import ANYWHERE
from sley_isp.embedding_columns import ColumnEmbeddings, TokenGather, check_embeddings
from sley_isp.param_group import ParamGroup, PublishedShards, UnshardedGroup
from sley_isp.prefetch import NO_CHANGE, Decision, PrefetchPolicy
from sley_isp.reduce_scatter import GradientReducer, WriteGradient
from sley_isp.sharded_layer import ShardedLayer, can_gather_for_layer
from sley_isp.sharded_module import ShardedModule, is_shardable
from sley_isp.vocabulary_head import VocabularyHead, find_head

if TYPE_CHECKING:
    from sley_core.api.model import Layer
    from sley_core.api.parts import Param, Parts
    from sley_core.protocols import MemoryPool
    from sley_isp.config import CommunicatorConfig

BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRADIENT)

WARMUP_STEPS = 2
"""The number of steps after which the pool should not allocate. The first step does not know the order of gathers yet."""

MAX_NAMES = 20
"""The maximum number of names in a message."""


class Counters:
    """Counts the exchanges and bytes of one rank, for `protocols.Counts`. sent: the counter of sent bytes."""

    def __init__(self) -> None:
        self.sent = SentBytes()
        self._totals = Counter(gathers=0, demand_gathers=0, gathered_bytes=0, reductions=0, reduced_bytes=0)
        self._current: Counter[str] = Counter()
        self._peaks = Counter(unsharded_groups=0, unsharded_bytes=0, full_gradients=0, full_gradient_bytes=0)
        self._start_totals = self._totals.copy()
        self._num_steps = 0
        self._report: dict[str, float] = {}

    def add(self, name: str, count: int) -> None:
        """Adds `count` to the total `name`, whose increase in a training step is reported as `{name}_per_step`."""
        self._totals[name] += count

    def change(self, name: str, difference: int) -> None:
        """Adds `difference` to the count `name`, whose peak is reported as `most_{name}`."""
        self._current[name] += difference
        self._peaks[name] = max(self._peaks[name], self._current[name])

    def begin(self) -> None:
        """Begins a step or an evaluation."""
        self.sent.begin_step()
        self._start_totals = self._totals.copy()

    def end_step(self, num_allocations: int) -> None:
        """Ends a training step. num_allocations: the number of allocations that the pool has made in the run."""
        self.sent.end_step()
        self._num_steps += 1
        self._report = {f"{name}_per_step": total - self._start_totals[name] for name, total in self._totals.items()}
        self._report |= self.sent.counts()
        if self._num_steps <= WARMUP_STEPS:
            self._warmup_allocations = num_allocations
        if self._num_steps >= WARMUP_STEPS:
            self._report[f"allocations_after_step_{WARMUP_STEPS}"] = num_allocations - self._warmup_allocations

    def report(self) -> dict[str, float]:
        """Returns the counts of the last training step and the peaks of all steps and evaluations."""
        return self._report | {f"most_{name}": peak for name, peak in self._peaks.items()}


class Communicator(WeightCommunicator):
    """Gathers sharded weights before each use, and reduces their gradients."""

    pool: MemoryPool
    reducer: GradientReducer
    column_embeddings: ColumnEmbeddings

    def __init__(self, config: CommunicatorConfig) -> None:
        self.config = config
        self.prefetch = PrefetchPolicy(config.ahead if config.overlap else 0)
        self.counters = Counters()
        self.modules: list[ShardedModule] = []
        self.groups: list[ParamGroup] = []
        self._unsharded: dict[ParamGroup, UnshardedGroup] = {}
        self._action: Action | None = None
        self._phase = Phase.TRAIN
        self._action_index = self._last_index = -1
        self._drain_indices: set[int] = set()
        self._head_name: tuple[str, str] | None = None
        self._open_layer: tuple[ShardedLayer, list[UnshardedGroup]] | None = None
        self._open_stack = ExitStack()
        self._undo = ExitStack()

    def prepare(self, layers: Sequence[Layer]) -> None:
        """Checks the options `head`, `embedding` and `launch`. Raises PlanError if the model lacks the modules for them."""
        if self.config.head == "vocabulary":
            self._head_name = layers[-1].name, find_head(layers)
        if self.config.embedding == "hidden":
            check_embeddings(layers)
        if self.config.launch != ANYWHERE:
            check_prefetch_points(layers, self.config.launch)

    def shard_dim(self, locations: Sequence[tuple[nn.Module, str]]) -> int | None:
        """Returns 1 for tables that are sharded by columns, 0 for other sharded parameters, and None for unsharded ones."""
        if not all(is_shardable(module, attribute) for module, attribute in locations):
            return 0 if can_gather_for_layer(locations) else None
        return int(self.config.embedding == "hidden" and isinstance(locations[0][0], nn.Embedding))

    def attach(self, parts: Parts) -> None:
        """Patches the forwards of all sharded modules, and replaces their weights by stand-ins. Undoes all after an error."""
        config = self.config
        self._parts = parts
        self._group = parts.groups["wp"]
        self._published = PublishedShards(self._group, parts.waits.is_due)
        self.pool = parts.pool
        max_in_flight, per_step = config.max_reductions if config.overlap else 0, config.reduce == "step"
        self.reducer = GradientReducer(max_in_flight, parts, self.pool, self._group, self.counters, per_step=per_step)
        self._token_gather = TokenGather(self._group, parts.world.device, self.counters)
        self.column_embeddings = ColumnEmbeddings(self._token_gather, parts, self._prepare_lookup, self._can_overlap)
        self._direct_params = {
            param
            for param in parts.registry
            if param.shard is not None
            and not parts.is_compiled  # a graph cannot contain the exchanges of its linears
            and all(is_shardable(holder.module, holder.attribute) for holder in param.holders)
        }
        try:
            for layer in parts.layers:
                self._shard_layer(layer)
            StandIn.replace(parts.registry)
        except BaseException:
            self.detach()
            raise

    def _shard_layer(self, layer: Layer) -> None:
        """Assigns the sharded parameters of `layer` to groups, and patches the forwards of their modules."""
        head_layer, head_name = self._head_name or ("", "")
        head: Any = layer.module.get_submodule(head_name) if head_layer == layer.name else None
        layer_groups: dict[torch.dtype, ParamGroup] = {}

        def layer_group(param: Param) -> ParamGroup:
            dtype = self._parts.weights.dtype_of(param)
            name = f"{layer.name} in {dtype}" if layer_groups else layer.name
            return layer_groups.setdefault(dtype, ParamGroup(name, layer.name))

        modules: list[ShardedModule] = []
        others: dict[ParamGroup, dict[Param, None]] = {}
        patched: set[nn.Module] = {sharded.module for sharded in self.modules}
        patched |= {embedding.module for embedding in self.column_embeddings.embeddings}
        for name, module in layer.module.named_modules(prefix=layer.name):
            attributes = [] if module in patched else [key for key, value in module._parameters.items() if value is not None]
            params = {attribute: self._parts.registry[f"{name}.{attribute}"] for attribute in attributes}
            params = {attribute: param for attribute, param in params.items() if param.shard is not None}
            for param in params.values():
                self._parts.store.expect_products(param)
            num_dtypes = len({self._parts.weights.dtype_of(param) for param in params.values()})
            if num_dtypes > 1 or not self._direct_params.issuperset(params.values()):
                for param in params.values():
                    others.setdefault(layer_group(param), {})[param] = None
                continue
            if not params:
                continue
            if isinstance(module, nn.Embedding) and self.config.embedding == "hidden":
                self._patch(module, self.column_embeddings.add(name, layer.name, module, params["weight"]).forward)
                continue
            group = (
                ParamGroup(name, layer.name)
                if self.config.unit == "module" or module is head
                else layer_group(next(iter(params.values())))
            )
            group.params += [param for param in params.values() if param not in group.params]
            if group not in self.groups:
                self.groups.append(group)
            sharded = ShardedModule(self, group, module, params, can_fuse=not self._parts.store.reduction.fixed_order)
            sharded.sink = Handover(partial(self._reduce, sharded), self._parts.queue)
            self.reducer.register(group, sharded.params)
            self.modules.append(sharded)
            forward: Callable[[Tensor], Any] = sharded.forward
            chunks = self._parts.head
            is_chunked = chunks is not None and name == chunks.name
            if module is head:
                vocabulary_head = VocabularyHead(sharded, self._token_gather, self._parts, self.pool)
                forward = vocabulary_head.forward
                if chunks is not None and is_chunked:
                    forward = ChunkedVocabularyHead(chunks, vocabulary_head).forward
            else:
                modules.append(sharded)
                if chunks is not None and is_chunked:
                    forward = GatheredHead(chunks, sharded).forward
            self._patch(module, forward)
        points = set(prefetch_points(layer, self.config.launch) if layer_groups else ())
        if others:
            self._gather_for_layer(layer, others).can_prefetch = not points
        for sharded in modules:
            sharded.can_prefetch = not points or sharded.module in points
        for point in points - {sharded.module for sharded in modules}:
            group = next(iter(layer_groups.values()))
            self._undo.callback(point.register_forward_pre_hook(partial(self._prefetch_at_point, group)).remove)

    def _gather_for_layer(self, layer: Layer, params: Mapping[ParamGroup, Collection[Param]]) -> ShardedLayer:
        """Adds `params` of other modules than plain linears and embeddings to groups, and patches the layer's forward."""
        for group, params_of_group in params.items():
            group.params += [param for param in params_of_group if param not in group.params]
            group.has_linear = True
            if group not in self.groups:
                self.groups.append(group)
            self.reducer.register(group, params_of_group)
        sharded_layer = ShardedLayer(self, layer, params, self._parts)
        self._undo.callback(sharded_layer.patch.undo)
        return sharded_layer

    def _patch(self, module: nn.Module, forward: Callable[[Tensor], Any]) -> None:
        self._undo.callback(ForwardPatch(module, forward).undo)

    def detach(self) -> None:
        """Restores the original forwards of the modules, but keeps the stand-ins."""
        self._published.discard()
        self._close_layer()
        self._undo.close()
        self.modules.clear()

    def begin(self, actions: Sequence[Action], phase: Phase) -> None:
        """Begins a step or an evaluation: discards the state of a failed step and publishes the shards over `wp`."""
        self._close_layer()
        self._action = None
        self._phase = phase
        actions = [action for action in actions if action.kind is not Kind.CHUNK_DONE]  # which run nothing
        last_indices = {action.chunk: index for index, action in enumerate(actions) if action.kind.makes_gradients}
        # Includes the preceding action, since a last gradient action must not start with earlier reductions in flight.
        self._drain_indices = {index - offset for index in last_indices.values() for offset in (0, 1)}
        self._action_index = -1
        self._last_index = len(actions) - 1
        passes = [(phase, action.kind, action.chunk) for action in actions if action.kind is not Kind.WEIGHT_GRADIENT]
        self.prefetch.begin(passes)
        self._apply(Decision(reshard=list(self._unsharded)))
        self._published.finish()
        self.reducer.discard()
        self.column_embeddings.discard()
        self.counters.begin()
        if self.config.overlap:
            self._published.publish(self.groups)

    @contextmanager
    def wrap_action(self, action: Action) -> Iterator[None]:
        """Runs `action` in the block. Ends a chunk's last gradient action only after the chunk's reductions are complete."""
        self._action_index += 1
        is_pass = action.kind is not Kind.WEIGHT_GRADIENT
        if is_pass:
            self.prefetch.begin_pass()
        self._action = action
        try:
            yield
        finally:
            self._close_layer()
            self._action = None
        self.reducer.flush()
        if is_pass:
            self._apply(self.prefetch.end_pass())
        is_drain = self._action_index in self._drain_indices
        self.column_embeddings.finish_action(is_drain=is_drain)
        if is_drain:
            self.reducer.finish()
        if self._action_index == self._last_index:
            self._published.finish()
            if self._phase is Phase.TRAIN:
                self.counters.end_step(getattr(self.pool, "num_allocations", 0))

    def counts(self) -> dict[str, float]:
        """Returns the counts of the last step and the peaks, as `protocols.Counts`."""
        return self.counters.report()

    @property
    def is_running(self) -> bool:
        """Whether an action of a step or an evaluation is running. If not, a program calls the model by hand."""
        return self._action is not None

    @property
    def is_recomputing(self) -> bool:
        """Whether a forward at this time is a recomputation, since a backward action is running."""
        return self._action is not None and self._action.kind in BACKWARDS

    @contextmanager
    def unshard(
        self, group: ParamGroup, params: Collection[Param], *, num_holds: int = 0, can_prefetch: bool
    ) -> Iterator[UnshardedGroup]:
        """Unshards `group` for a use of `params` in the block, which must call `wait` before it reads weights.

        num_holds: +1 to hold the group after a recomputation until its backward, -1 to end the hold. can_prefetch: whether
        prefetches may start. During an action, the prefetch policy decides when to reshard the group. Otherwise the group is
        resharded at the end of the block.
        """
        if self._action is None:
            unsharded = self._all_gather(group)
            try:
                yield unsharded
            finally:
                unsharded.reshard()
                unsharded.wait_sent()
            return
        current = self._unsharded.get(group)
        if current is not None and current.is_stale(params):
            self._apply(Decision(reshard=[group]))
            self.prefetch.mark_sharded(group)
        decision = self.prefetch.use(group, num_holds=num_holds, can_prefetch=can_prefetch)
        if decision is not NO_CHANGE:
            self.counters.add("demand_gathers", decision.unshard[:1] == [group])
            self._apply(decision)
        yield self._unsharded[group]

    @contextmanager
    def unshard_layer(self, layer: ShardedLayer) -> Iterator[list[UnshardedGroup]]:
        """Unshards and holds the groups of `layer` during the block. Closes another layer that is open for its backward."""
        if self._open_layer is not None and self._open_layer[0] is not layer:
            self._close_layer()
        with ExitStack() as stack:
            unsharded_groups = []
            for group, params in layer.params.items():
                unshard = self.unshard(group, params, num_holds=1, can_prefetch=layer.can_prefetch)
                unsharded_groups.append(stack.enter_context(unshard))
                stack.callback(self.prefetch.release, group)
            for unsharded in unsharded_groups:
                unsharded.wait()
            yield unsharded_groups

    def open_layer(self, layer: ShardedLayer) -> list[UnshardedGroup]:
        """Returns the full parameters of `layer` for its backward, until another layer is used or the backward ends.

        Modules have the parameters, too, since the layer may recompute parts of itself.
        """
        if self._open_layer is None or self._open_layer[0] is not layer:
            unsharded_groups = self._open_stack.enter_context(self.unshard_layer(layer))
            self._open_layer = layer, unsharded_groups
            self._open_stack.enter_context(layer.installed(layer.full_tensors(unsharded_groups)))
            if self._action is None:
                torch.autograd.Variable._execution_engine.queue_callback(self._close_layer)
        return self._open_layer[1]

    def _close_layer(self) -> None:
        """Ends the use of the layer that is open for its backward, if any."""
        self._open_layer = None
        self._open_stack.close()

    def _apply(self, decision: Decision) -> None:
        """Reshards and unshards the groups of `decision`, in this order."""
        for group in decision.reshard:
            assert isinstance(group, ParamGroup), group
            unsharded = self._unsharded.pop(group)
            unsharded.reshard()
            self._published.resharded_groups.append(unsharded)  # peers may receive the shards until the end of the step
            self.counters.change("unsharded_groups", -1)
            self.counters.change("unsharded_bytes", -unsharded.num_bytes)
        for group in decision.unshard:
            assert isinstance(group, ParamGroup), group
            unsharded = self._unsharded[group] = self._all_gather(group)
            self.counters.add("gathers", 1)
            self.counters.add("gathered_bytes", unsharded.num_received_bytes)
            self.counters.sent.add_message(unsharded.num_received_bytes)  # each rank sends as much as it receives
            self.counters.change("unsharded_groups", 1)
            self.counters.change("unsharded_bytes", unsharded.num_bytes)

    def _all_gather(self, group: ParamGroup) -> UnshardedGroup:
        """Starts the all-gather of `group` once its layer's weights are current. Without `overlap`, also waits for it."""
        has_waited = self._parts.waits.wait_for(group.layer)
        is_unchanged = self._action is not None and not has_waited
        source = self._published.source(group) if is_unchanged else self._group.transport("gather")
        unsharded = UnshardedGroup(group, self.pool, source, self._group.size)
        if not self.config.overlap:
            unsharded.wait()
        return unsharded

    def _prefetch_at_point(self, group: ParamGroup, *_: Any) -> None:
        """Starts prefetches before a module without sharded weights that `launch` names, as a use of the layer would."""
        if self._action is not None:
            with self.unshard(group, (), can_prefetch=True):
                pass

    def _can_overlap(self) -> bool:
        return self.config.overlap and self._action is not None

    def _prepare_lookup(self, layer: str) -> None:
        """Waits until the weights of `layer` are current, and prefetches the first groups of the pass."""
        self._parts.waits.wait_for(layer)
        if self._can_overlap():
            self._apply(self.prefetch.prefetch_first_groups())

    def _reduce(self, module: ShardedModule, output_gradient: Tensor, inputs: Tensor) -> None:
        """Adds the gradients of `module`'s weights to their buckets."""
        write = module.write_gradient
        self.reduce(module.group, {param: partial(write, param, output_gradient, inputs) for param in module.trainable_params})

    @torch.no_grad()
    def reduce(self, group: ParamGroup, gradients: Mapping[Param, WriteGradient]) -> None:
        """Adds `gradients` of parameters of `group` to their buckets."""
        for param in gradients:
            self._parts.store.check_open(param)  # raises before anything is leased or sent
        for param, write in gradients.items():
            self.reducer.add(group, param, write)
        if self._action is None:
            self.reducer.flush(all_buckets=True)
            self.reducer.finish()


def prefetch_points(layer: Layer, pattern: str) -> list[nn.Module]:
    """Returns the modules whose names within `layer` match `pattern`, or an empty list if `pattern` is ANYWHERE."""
    if pattern == ANYWHERE:
        return []
    return [module for name, module in _callable_modules(layer).items() if fnmatchcase(name, pattern)]


def check_prefetch_points(layers: Sequence[Layer], pattern: str) -> None:
    """Raises PlanError "launch-point" if `pattern` matches no module."""
    if any(prefetch_points(layer, pattern) for layer in layers):
        return
    names = list(dict.fromkeys(name for layer in layers for name in _callable_modules(layer)))
    text = ", ".join(f"`{name}`" for name in names[:MAX_NAMES]) or "no modules"
    if len(names) > MAX_NAMES:
        text += f" and {len(names) - MAX_NAMES} more"
    raise PlanError(
        "launch-point",
        f"`{pattern}` matches no module of any layer; the modules are {text}",
        path=("weights", "launch"),
        hint=suggestion(pattern, names, "use a module's name within its layer, or a pattern of such names"),
    )


def _callable_modules(layer: Layer) -> dict[str, nn.Module]:
    """Returns the modules of `layer` that have a forward, unlike ModuleList, by their names within the layer."""
    modules = layer.module.named_modules()
    return {name: module for name, module in modules if name and type(module).forward is not nn.Module.forward}

"""`isp.communicator`: shards the parameters of any model over `wp`, and all-gathers them just before each use.

LayerCaller ──> layer ──> ShardedModule.forward ──> unshard ──> PrefetchPolicy decides ──> all-gathers start, buffers are freed
                                                       ^
Executor ──> begin, wrap_action ───────────────────────┘
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from sley_core.api.actions import Action, Kind
from sley_core.api.model import ForwardPatch, Layer
from sley_core.api.parts import Param, Parts, Phase
from sley_core.api.plan import suggestion
from sley_core.api.weights import StandIn
from sley_core.errors import PlanError
from sley_core.protocols import WeightCommunicator
from sley_isp.param_group import ParamGroup, PublishedShards, UnshardedGroup
from sley_isp.plugin import ANYWHERE, CommunicatorConfig
from sley_isp.prefetch import NO_CHANGE, Decision, PrefetchPolicy
from sley_isp.reduce_scatter import MAX_IN_FLIGHT, Counters, GradientReducer, Reduction, WriteGradient
from sley_isp.sharded_modules import ShardedLayer, ShardedModule, can_gather_for_layer, is_shardable
from sley_isp.vocabulary import ColumnEmbedding, GatheredHead, TokenGather, VocabularyHead, check_embeddings, find_head

BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRADIENT)
"""The types of actions in which any forward is a recomputation."""


class Communicator(WeightCommunicator):
    """Gathers sharded weights before each use, and reduces their gradients. action: the running action, or None."""

    def __init__(self, config: CommunicatorConfig) -> None:
        self.config = config
        aheads = [group.ahead or 0 for group in config.groups]
        self.prefetch = PrefetchPolicy(max([config.ahead, *aheads]) if config.overlap else 0)
        self.counters = Counters()
        self.groups: list[ParamGroup] = []
        self._patched: set[nn.Module] = set()
        self._unsharded: dict[ParamGroup, UnshardedGroup] = {}
        self.action: Action | None = None
        self._phase = Phase.TRAIN
        self._action_index = self._last_index = -1
        self._drain_indices: set[int] = set()
        self._open_layer: tuple[ShardedLayer, list[UnshardedGroup]] | None = None
        self._open_stack = ExitStack()
        self._undo = ExitStack()

    def prepare(self, layers: Sequence[Layer]) -> None:
        """Checks that the model fits the keys of [weights]. Raises PlanError "launch-point" if no module matches `launch`,
        "group-unmatched" if a group gets no parameter, and the errors of `find_head` and `check_embeddings`.
        """
        if self.config.head == "vocabulary":
            self.head = find_head(layers)
        if self.config.embedding == "hidden":
            check_embeddings(layers)
        launch = self.config.launch
        if launch != ANYWHERE and not any(prefetch_points(layer, launch) for layer in layers):
            modules = list(dict.fromkeys(name for layer in layers for name, _ in layer.module.named_modules() if name))
            hint = suggestion(launch, modules, "use a module's name within its layer, or a pattern of such names")
            raise PlanError("launch-point", f"`{launch}` matches no module of any layer", path=("weights", "launch"), hint=hint)
        names = [name for layer in layers for name, _ in layer.module.named_parameters(layer.name)]
        matching = {self.config.group_index(name) for name in names}
        for index, pattern in enumerate(group.match for group in self.config.groups):
            if index in matching:
                continue
            message = f"the group `{pattern}` is empty: no parameter matches it, or earlier groups contain all that do"
            hint = suggestion(pattern, names, "use a name that `train-cli show` prints, narrower patterns first")
            raise PlanError("group-unmatched", message, path=("weights", "groups", index, "match"), hint=hint)

    def shard_dim(self, locations: Sequence[tuple[nn.Module, str]]) -> int | None:
        """Returns the dim along which the parameter at `locations` is sharded: 1 for embedding tables that are sharded by
        columns, and 0 for all other parameters. Returns None if the parameter cannot be sharded.
        """
        if not all(is_shardable(module, attribute) for module, attribute in locations):
            return 0 if can_gather_for_layer(locations) else None
        return int(self.config.embedding == "hidden" and isinstance(locations[0][0], nn.Embedding))

    def attach(self, parts: Parts) -> None:
        """Replaces the forwards of all sharded modules, and their weights with stand-ins. After an error, restores forwards."""
        config = self.config
        self._parts = parts
        self._group = parts.groups["wp"]
        self._published = PublishedShards(self._group, parts.waits.is_due)
        self.reducer = GradientReducer(MAX_IN_FLIGHT if config.overlap else 0, parts, self._group, self.counters)
        self.token_gather = TokenGather(self._group, parts.world.device, self.counters)
        self._direct_params = {
            param
            for param in parts.registry
            if param.shard is not None
            and not parts.is_compiled  # a compiled graph cannot contain the exchanges of its linears
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
        """Assigns the sharded parameters of `layer` to groups, and replaces the forwards of their modules."""
        config, parts = self.config, self._parts
        points = prefetch_points(layer, config.launch)
        groups: dict[Hashable, ParamGroup] = {}
        others: dict[ParamGroup, dict[Param, None]] = {}

        def buffer_key(param: Param) -> Hashable:
            """Returns the index of the options of `param`, and its dtype. Parameters with equal keys can share one buffer."""
            return config.group_index(param.name), parts.weights.dtype_of(param)

        def add_to_group(key: Hashable, params: Collection[Param]) -> ParamGroup:
            """Adds `params` to the group `key`, which is the name of a module or the key of a buffer, and returns the group."""
            if key not in groups:
                options = config.with_group(config.group_index(next(iter(params)).name))
                name = key if isinstance(key, str) else f"{layer.name} ({len(groups) + 1})" if groups else layer.name
                groups[key] = ParamGroup(name, layer.name, options, parts.pool, can_prefetch=not points)
                unit = layer.name if options.unit == "layer" else name
                self.prefetch.add_group(groups[key], unit=unit, ahead=options.ahead)
            groups[key].params += [param for param in params if param not in groups[key].params]
            self.reducer.register(groups[key], params)
            return groups[key]

        for name, module in layer.module.named_modules(prefix=layer.name):
            values = {} if module in self._patched else module._parameters
            all_params = {key: parts.registry[f"{name}.{key}"] for key, value in values.items() if value is not None}
            params = {attribute: param for attribute, param in all_params.items() if param.shard is not None}
            for param in params.values():
                param.has_products = True
            keys = {buffer_key(param) for param in params.values()}
            if len(params) < len(all_params) or len(keys) > 1 or not self._direct_params.issuperset(params.values()):
                for param in params.values():
                    others.setdefault(add_to_group(buffer_key(param), [param]), {})[param] = None
            elif isinstance(module, nn.Embedding) and params and config.embedding == "hidden":
                table = ParamGroup(layer.name, layer.name, config, parts.pool)  # never gathered
                self._patch(module, ColumnEmbedding(self, table, module, params, parts).forward)
            elif isinstance(module, nn.Linear | nn.Embedding) and params:
                head = parts.head if parts.head is not None and parts.head.name == name else None
                is_vocabulary = head is not None and config.head == "vocabulary"
                is_unit = is_vocabulary or config.with_group(config.group_index(params["weight"].name)).unit == "module"
                group = add_to_group(name if is_unit else keys.pop(), params.values())
                sharded = ShardedModule(self, group, module, params, parts)
                head_class = VocabularyHead if is_vocabulary else GatheredHead
                self._patch(module, sharded.forward if head is None else head_class(head, sharded).forward)
        self.groups += groups.values()
        if others:
            self._undo.callback(ShardedLayer(self, layer, others, parts).patch.undo)
        for point in points if groups else ():
            hook = partial(self._prefetch_at_point, next(iter(groups.values())))
            self._undo.callback(point.register_forward_pre_hook(hook).remove)

    def _patch(self, module: nn.Module, forward: Callable[[Tensor], Any]) -> None:
        self._patched.add(module)
        self._undo.callback(ForwardPatch(module, forward).undo)

    def detach(self) -> None:
        """Restores the original forwards of the modules. The stand-ins remain in place of the sharded weights."""
        self._published.discard()
        self._close_layer()
        self._undo.close()

    def begin(self, actions: Sequence[Action], phase: Phase) -> None:
        """Begins a step or an evaluation. Discards a failed step's state and, with `overlap`, publishes shards over `wp`."""
        self._close_layer()
        self.action = None
        self._phase = phase
        actions = [action for action in actions if action.kind is not Kind.CHUNK_DONE]  # these run nothing
        last_indices = {action.chunk: index for index, action in enumerate(actions) if action.kind.makes_gradients}
        # The indices include the preceding action, since a last gradient action must not start with earlier reductions in
        # flight.
        self._drain_indices = {index - offset for index in last_indices.values() for offset in (0, 1)}
        self._action_index = -1
        self._last_index = len(actions) - 1
        passes = [(phase, action.kind, action.chunk) for action in actions if action.kind is not Kind.WEIGHT_GRADIENT]
        self.prefetch.begin(passes)
        self._apply(Decision(list(self._unsharded), []))
        self._published.finish()
        self.reducer.discard()
        self.counters.begin_step()
        if self.config.overlap:
            self._published.publish(self.groups)

    @contextmanager
    def wrap_action(self, action: Action) -> Iterator[None]:
        """Lets `action` run in the block, then starts reductions and reshards groups. After the last gradient action of a
        chunk, and after the action before it, waits for all reductions.
        """
        self._action_index += 1
        is_pass = action.kind is not Kind.WEIGHT_GRADIENT
        if is_pass:
            self.prefetch.begin_pass()
        self.action = action
        try:
            yield
        finally:
            self._close_layer()
            self.action = None
        self.reducer.flush()
        if is_pass:
            self._apply(self.prefetch.end_pass())
        if self._action_index in self._drain_indices:
            self.reducer.finish()
        if self._action_index == self._last_index:
            self._published.finish()
            if self._phase is Phase.TRAIN:
                self.counters.end_step()

    def counts(self) -> dict[str, float]:
        return self.counters.counts()

    @property
    def is_recomputing(self) -> bool:
        """Whether a backward action is running, so that any forward is a recomputation."""
        return self.action is not None and self.action.kind in BACKWARDS

    @contextmanager
    def unshard(self, group: ParamGroup, *, num_holds: int = 0, is_launch: bool = False) -> Iterator[UnshardedGroup]:
        """Unshards `group` for the block, which must call `wait` on the yielded object before it reads weights.

        num_holds: +1 to hold the group after a recomputation until its backward, -1 in that backward. is_launch: whether the
        key `launch` names the module that runs next. During an action, the prefetch policy decides when to reshard the group.
        Otherwise the group is resharded at the end of the block.
        """
        if self.action is None:
            unsharded = self._all_gather(group)
            try:
                yield unsharded
            finally:
                unsharded.reshard()
                unsharded.wait_sent()
            return
        current = self._unsharded.get(group)
        if current is not None and current.version != group.version:
            self._apply(Decision([group], []))
            self.prefetch.unsharded.remove(group)
        can_prefetch = group.can_prefetch or is_launch or num_holds < 0
        decision = self.prefetch.use(group, num_holds=num_holds, can_prefetch=can_prefetch)
        if decision is not NO_CHANGE:
            self.counters.totals["demand_gathers"] += decision.unshard[:1] == [group]
            self._apply(decision)
        yield self._unsharded[group]

    @contextmanager
    def unshard_layer(self, layer: ShardedLayer) -> Iterator[list[UnshardedGroup]]:
        """Unshards the groups of `layer`, waits for them, and holds them in the block. Closes another open layer first."""
        if self._open_layer is not None and self._open_layer[0] is not layer:
            self._close_layer()
        with ExitStack() as stack:
            unsharded_groups = []
            for group in layer.params:
                unsharded_groups.append(stack.enter_context(self.unshard(group, num_holds=1)))
                stack.callback(self.prefetch.change_holds, group, -1)
            for unsharded in unsharded_groups:
                unsharded.wait()
            yield unsharded_groups

    def open_layer(self, layer: ShardedLayer) -> list[UnshardedGroup]:
        """Returns the unsharded groups of `layer`, for the backward of this layer. The layer's modules have full parameters
        until another layer is used or the backward ends, since the backward may recompute parts of the layer.
        """
        if self._open_layer is None or self._open_layer[0] is not layer:
            unsharded_groups = self._open_stack.enter_context(self.unshard_layer(layer))
            self._open_layer = layer, unsharded_groups
            self._open_stack.enter_context(layer.install(layer.make_full_leaves(unsharded_groups)))
            if self.action is None:
                torch.autograd.Variable._execution_engine.queue_callback(self._close_layer)
        return self._open_layer[1]

    def _close_layer(self) -> None:
        self._open_layer = None
        self._open_stack.close()

    def _apply(self, decision: Decision) -> None:
        """Reshards the groups in `decision.reshard`, starts to unshard the groups in `decision.unshard`, and counts both."""
        for group in cast(list[ParamGroup], decision.reshard):
            unsharded = self._unsharded.pop(group)
            unsharded.reshard()
            self._published.resharded_groups.append(unsharded)  # peers may still receive this rank's shards
            self.counters.change("unsharded_groups", -1)
        for group in cast(list[ParamGroup], decision.unshard):
            unsharded = self._unsharded[group] = self._all_gather(group)
            self.counters.totals["gathers"] += 1
            self.counters.totals["gathered_bytes"] += unsharded.num_received_bytes
            self.counters.add_message(unsharded.num_received_bytes)  # each rank sends as much as it receives
            self.counters.change("unsharded_groups", 1)

    def _all_gather(self, group: ParamGroup) -> UnshardedGroup:
        """Waits until the weights of the layer are current, then gathers `group`. Blocks only without `overlap`."""
        has_waited = self._parts.waits.wait_for(group.layer)
        unsharded = self._published.gather(group, is_unchanged=self.action is not None and not has_waited)
        if not self.config.overlap:
            unsharded.wait()
        return unsharded

    def _prefetch_at_point(self, group: ParamGroup, *_: Any) -> None:
        """Starts prefetches before a module that `launch` names. `group` is the layer's first group."""
        if self.action is not None:
            with self.unshard(group, is_launch=True):
                pass

    def enqueue_reduction(self, reduction: Reduction) -> None:
        """Adds `reduction`, which has started, to the reductions in flight. If no action is running, also waits for it."""
        self.reducer.enqueue(reduction)
        if self.action is None:
            self.reducer.finish()

    @torch.no_grad()
    def reduce(self, group: ParamGroup, gradients: Mapping[Param, WriteGradient]) -> None:
        """Adds the gradients of parameters in `group` to their buckets. If no action is running, also completes the reductions
        of these buckets. gradients: for each parameter, the function that writes its gradient.
        """
        for param in gradients:
            self._parts.store.check_open(param)  # raises before anything is leased or sent
        for param, write in gradients.items():
            self.reducer.add(group, param, write)
        if self.action is None:
            self.reducer.flush(all_buckets=True)
            self.reducer.finish()


def prefetch_points(layer: Layer, pattern: str) -> list[nn.Module]:
    """Returns the modules that have a forward and whose names within `layer` match `pattern`; [] if `pattern` is ANYWHERE."""
    return [
        module
        for name, module in layer.module.named_modules()
        if pattern != ANYWHERE and name and fnmatchcase(name, pattern) and type(module).forward is not nn.Module.forward
    ]

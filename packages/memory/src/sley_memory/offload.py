"""Offloads the parts of a run's memory that an `[[offload]]` table names, with one mover per part."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import inf

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from sley_core.api.memory import MemoryInventory, Moved, OffloadManager, OptimizerParam, Part, StorageEntry, Where, storage_id
from sley_core.api.model import Layer
from sley_core.api.parts import Param, Parts
from sley_core.errors import StateError
from sley_memory.arena import HostArena
from sley_memory.host_optimizer import HostOptimizer
from sley_memory.movers import FreedGradients, HostCopy, ListStorages, Mover, Streams, TrimmedPools, merge_small, split_by_bytes
from sley_memory.plugin import HostOptimizerConfig, OffloadConfig

LAYER_PARTS: tuple[Part, ...] = ("weights", "buffers")
"""The parts that the forward of a layer needs."""


class BetweenSteps(Mover):
    """Steps the optimizer bucket by bucket, and keeps the states of other buckets on the host. Registers itself with the run.

        tail of the backward    update of 0      update of 1                  update of 2      next forward
        0 comes ............... 1 comes ........ 0 leaves, 2 comes .......... 1 leaves ....... 2 leaves

    The states of at most two buckets are on the device at once. bucket_bytes: the maximum bytes of the parameters in a bucket;
    AdamW's states are twice as large. Calls of `offload` and `onload` do nothing.
    """

    is_onloaded_automatically = True

    def __init__(
        self, inventory: MemoryInventory, parts: Parts, streams: Streams, arena: HostArena, bucket_bytes: int, counters: Moved
    ) -> None:
        super().__init__(counters)
        self._inventory = inventory
        self._new_host_copy = partial(
            HostCopy, streams=streams, arena=arena, bucket_bytes=bucket_bytes, counters=counters, reserves_segment=False
        )
        self._bucket_bytes = bucket_bytes
        self._buckets: list[tuple[list[OptimizerParam], HostCopy]] = []
        self._is_before_first_gradient = False
        parts.events.step_in_buckets = self._step
        parts.events.began.append(self._start_step)
        parts.events.after_update.append(self._offload_buckets)
        parts.store.on_ready.append(self._gradient_ready)

    @property
    def where(self) -> Where:
        """The location of the first bucket that is not away. If all buckets are away, as between two steps, it is AWAY."""
        return next((states.where for _, states in self._buckets if states.where is not Where.AWAY), Where.AWAY)

    def wait(self) -> None:
        for _, states in self._buckets:
            states.wait()

    def host(self) -> Mapping[int, Tensor]:
        return {key: copy for _, states in self._buckets for key, copy in states.host().items()}

    def _start_step(self) -> None:
        """Offloads states that a failed step left on the device."""
        self._offload_buckets()
        self._is_before_first_gradient = True

    def _gradient_ready(self, _param: Param) -> None:
        """Starts to onload the first bucket at the step's first gradient, while the backward continues."""
        if self._is_before_first_gradient:
            self._is_before_first_gradient = False
            self._onload_bucket(0)

    def _step(self, params: Sequence[OptimizerParam]) -> Iterator[Sequence[OptimizerParam]]:
        """Yields each bucket once later device work can use its states. Starts to onload the next bucket before that. When the
        caller has updated the bucket, starts to offload its states.
        """
        # Adds buckets for new weights: all weights in the first step, and later those that were unfrozen.
        known_ids = {id(param.parameter) for bucket, _ in self._buckets for param in bucket}
        for bucket in split_by_bytes([param for param in params if id(param.parameter) not in known_ids], self._bucket_bytes):
            self._buckets.append((bucket, self._new_host_copy(self._make_state_lister(bucket))))
        self._onload_bucket(0)
        for index, (bucket, states) in enumerate(self._buckets):
            self._onload_bucket(index + 1)
            states.require()
            yield bucket
            states.offload()

    def _onload_bucket(self, index: int) -> None:
        """Starts to onload the states of bucket `index`, if that bucket exists and is away or leaving."""
        if index < len(self._buckets) and self._buckets[index][1].where in (Where.LEAVING, Where.AWAY):
            self._buckets[index][1].onload()

    def _offload_buckets(self) -> None:
        """Starts to offload the states of all buckets that are here or coming."""
        for _, states in self._buckets:
            if states.where in (Where.HERE, Where.COMING):
                states.offload()

    def _make_state_lister(self, bucket: Sequence[OptimizerParam]) -> ListStorages:
        """Returns a function that lists the states of a bucket's weights, with small storages merged. States that weights of
        other buckets share are left out, since they must stay on the device while those weights are updated.
        """
        known_ids: set[int] = set()
        shared_ids: set[int] = set()

        def list_storages() -> list[StorageEntry]:
            states = self._inventory.state_storages(bucket)
            state_ids = {storage_id(state.memory) for state in states}
            if not state_ids <= known_ids:  # states are new in the first step, and after a program has loaded states
                shared_ids.update(state_ids & self._inventory.storage_ids_without(bucket))
                known_ids.clear()
                known_ids.update(state_ids)
            own_states = [state for state in states if storage_id(state.memory) not in shared_ids]
            storages = merge_small(own_states, self._bucket_bytes)
            known_ids.update(storage_id(storage.memory) for storage in storages)
            return storages

        return list_storages


class HostOffloadManager(OffloadManager):
    """Moves the parts that its table names to host memory and back.

    With `when = "between_steps"`, optimizer states are on the device only while their weights are updated.
    `memory.host_optimizer` keeps them and the master weights on the host. All other parts move only when the program asks. If
    the run's tensors have no memory, as in an estimate, the manager is not attached and moves nothing.
    """

    def __init__(self, config: OffloadConfig) -> None:
        self.config = config
        self._moved: dict[Part, Moved] = {part: Moved() for part in config.moves}
        self._movers: dict[Part, Mover] = {part: Mover(moved) for part, moved in self._moved.items()}
        self._layers: Sequence[Layer] = ()
        self._hooks: list[RemovableHandle] = []
        self._streams: Streams | None = None

    @property
    def parts(self) -> Sequence[Part]:
        return self.config.moves

    def attach(self, parts: Parts, inventory: MemoryInventory) -> None:
        """Creates the copy streams, the host memory, and a mover for each part."""
        device = parts.world.device
        self._streams = Streams(device.copy_stream)
        if isinstance(self.config, HostOptimizerConfig):
            optimizer = HostOptimizer(parts, self._streams, self.config.bucket_bytes, self._moved)
            self._movers = dict.fromkeys(self.parts, optimizer)
            return
        budget_mb = self.config.host_budget_mb
        max_locked_bytes = inf if budget_mb is None else budget_mb * 10**6
        arena = HostArena(device.host_memory, self._streams.wait, max_locked_bytes=max_locked_bytes)
        self._layers = parts.layers
        for layer in parts.layers:
            # This check is for a program's own backward, which may gather shards after they were offloaded. In steps and
            # evaluations there are no hooks on any rank.
            check = partial(self._check_layers, "a use of a layer's weights")
            parts.waits.before_layer(layer.name, check, lambda: bool(self._hooks))
        for part in self.parts:
            self._movers[part] = self._new_mover(part, parts, inventory, arena)

    def _new_mover(self, part: Part, parts: Parts, inventory: MemoryInventory, arena: HostArena) -> Mover:
        assert self._streams is not None, "not attached"
        counters, bucket_bytes = self._moved[part], self.config.bucket_bytes
        if part == "gradients":
            return FreedGradients(inventory, counters)
        if part == "pools":
            return TrimmedPools(inventory.trim, counters)
        if part == "optimizer_states" and self.config.steps_in_buckets:
            return BetweenSteps(inventory, parts, self._streams, arena, bucket_bytes, counters)

        def list_storages() -> Sequence[StorageEntry]:
            storages = inventory.storages(part)
            return merge_small(storages, bucket_bytes) if part == "optimizer_states" else storages

        return HostCopy(list_storages, self._streams, arena, bucket_bytes, counters)

    def offload(self, part: Part) -> Callable[[], None]:
        """Starts to offload `part`, and returns a function that waits for the copies. While weights or buffers are away, calls
        of layers raise StateError `memory-away`.
        """
        if part in LAYER_PARTS:
            self._hook_layers()
        self._movers[part].offload()
        return self._movers[part].wait

    def onload(self, part: Part) -> Callable[[], None]:
        """Starts to onload `part`, and returns a function that waits for the copies."""
        self._movers[part].onload()
        self._unhook_layers()
        return self._movers[part].wait

    def host(self, part: Part) -> Mapping[int, Tensor]:
        return self._movers[part].host()

    def require(self, part: Part, caller: str) -> None:
        """Makes later device work wait for `part` if it is coming. Raises StateError `memory-away` if it is away or leaving,
        unless the manager onloads it by itself. caller: the operation that needs the part, for the error.
        """
        mover = self._movers[part]
        if mover.where in (Where.LEAVING, Where.AWAY) and not mover.is_onloaded_automatically:
            raise StateError.offloaded_error(part, caller)
        mover.require()
        self._unhook_layers()

    def where(self, part: Part) -> Where:
        return self._movers[part].where

    def moved(self, part: Part) -> Moved:
        return self._moved[part]

    def detach(self) -> None:
        """Onloads weights and buffers, so that the program can use the layers after the run, and waits for all copies."""
        for part in LAYER_PARTS:
            if part in self._movers:
                self._movers[part].close()
        self._unhook_layers()
        if self._streams is not None:
            self._streams.wait()  # host memory is freed with this object

    def _hook_layers(self) -> None:
        """Adds hooks to every module that check, before a forward or `state_dict`, that no weights or buffers are away."""
        for layer in () if self._hooks else self._layers:
            for module in layer.module.modules():
                self._hooks.append(module.register_forward_pre_hook(lambda *_: self._check_layers(), prepend=True))
                self._hooks.append(module.register_state_dict_pre_hook(lambda *_: self._check_layers()))  # type: ignore[no-untyped-call]

    def _unhook_layers(self) -> None:
        """Removes the hooks if weights and buffers are on the device, so that they do not slow down calls."""
        if all(self._movers[part].where is Where.HERE for part in LAYER_PARTS if part in self._movers):
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()

    def _check_layers(self, label: str = "a layer's forward") -> None:
        for part in LAYER_PARTS:
            if part in self._movers:
                self.require(part, label)

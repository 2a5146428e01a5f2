"""Offloads the parts of a run's memory that an `[[offload]]` table names. Each part has a mover."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle
from math import inf
from typing import NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from sley_core.api.comm import HostMemory
from sley_core.api.memory import MemoryInventory, Moved, OffloadManager, OptimizerParam, Part, StorageEntry, Where, storage_id
from sley_core.api.model import Layer
from sley_core.api.parts import ALIGNMENT_BYTES, FlatLayout, Param, Parts
from sley_core.errors import StateError
from sley_memory import movers
from sley_memory.arena import HostArena
from sley_memory.plugin import HostOptimizerConfig, OffloadConfig

LAYER_PARTS: tuple[Part, ...] = ("weights", "buffers")
"""The parts that the forward of a layer needs."""


class BucketedStateMover(movers.Mover):
    """Steps the optimizer bucket by bucket, and keeps the states of idle buckets on the host.

        tail of the backward    update of 0      update of 1                  update of 2      next forward
        0 comes ............... 1 comes ........ 0 leaves, 2 comes .......... 1 leaves ....... 2 leaves

    The states of at most two buckets are on the device at once. bucket_bytes: the maximum size in bytes of the parameters in a
    bucket; AdamW's states are twice as large. Calls of `offload` and `onload` do nothing.
    """

    is_onloaded_automatically = True

    def __init__(
        self,
        inventory: MemoryInventory,
        parts: Parts,
        streams: movers.Streams,
        arena: HostArena,
        bucket_bytes: int,
        counters: Moved,
    ) -> None:
        super().__init__(counters)
        self._inventory = inventory
        self._new_host_copy = partial(
            movers.HostCopyMover,
            streams=streams,
            arena=arena,
            bucket_bytes=bucket_bytes,
            counters=counters,
            reserves_segment=False,
        )
        self._bucket_bytes = bucket_bytes
        self._buckets: list[tuple[list[OptimizerParam], movers.HostCopyMover]] = []
        self._is_before_first_gradient = False
        parts.events.step_in_buckets = self._step
        parts.events.began.append(self._start_step)
        parts.events.after_update.append(self._offload_buckets)
        parts.store.on_ready.append(self._gradient_ready)

    @property
    def where(self) -> Where:
        """The location of the first bucket that is not away; AWAY if all buckets are away, as they are between two steps."""
        return next((states.where for _, states in self._buckets if states.where is not Where.AWAY), Where.AWAY)

    def wait(self) -> None:
        for _, states in self._buckets:
            states.wait()

    def host(self) -> Mapping[int, torch.Tensor]:
        return {key: copy for _, states in self._buckets for key, copy in states.host().items()}

    def _start_step(self) -> None:
        """Offloads states that a failed step left on the device."""
        self._offload_buckets()
        self._is_before_first_gradient = True

    def _gradient_ready(self, _param: Param) -> None:
        """Starts to onload the first bucket when the step's first gradient is ready, while the backward continues."""
        if self._is_before_first_gradient:
            self._is_before_first_gradient = False
            self._onload_bucket(0)

    def _step(self, params: Sequence[OptimizerParam]) -> Iterator[Sequence[OptimizerParam]]:
        """Starts to onload each next bucket, and yields each bucket when later device work can use its states. After the caller
        has updated the bucket, starts to offload the states.
        """
        # New weights get buckets: all weights in the first step, and later the weights that were unfrozen.
        known_ids = {id(param.parameter) for bucket, _ in self._buckets for param in bucket}
        for bucket in movers.split_params(
            [param for param in params if id(param.parameter) not in known_ids], self._bucket_bytes
        ):
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
        """Starts offloading the states of all buckets that are on the device or on their way to it."""
        for _, states in self._buckets:
            if states.where in (Where.HERE, Where.COMING):
                states.offload()

    def _make_state_lister(self, bucket: Sequence[OptimizerParam]) -> movers.ListStorages:
        """Returns a function that lists the states of a bucket's weights, and merges small storages. It omits states that other
        buckets share, since these must stay on the device while the other buckets are updated.
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
            storages = movers.merge_small(own_states, self._bucket_bytes)
            known_ids.update(storage_id(storage.memory) for storage in storages)
            return storages

        return list_storages


NUM_HOST_BUCKETS = 2
"""The number of buckets for which the host has memory: one is updated while the next is copied."""


class OptimizerBucket(NamedTuple):
    """Parameters that are updated together. gradients, weights: host tensors for their gradients, and for their new values in
    the dtype of the device's weights.
    """

    params: Sequence[OptimizerParam]
    gradients: Sequence[torch.Tensor]
    weights: list[torch.Tensor]


class HostOptimizer(movers.Mover):
    """Keeps master weights and optimizer states on the host, and steps the optimizer there, bucket by bucket. Weights and
    gradients stay on the device. counters: the counters of "masters" and "optimizer_states". All weights must have one dtype.

        gradients to the host   0 | 1 | 2 | ...
        optimizer on the host       0 | 1 | 2 | ...
        weights to the device           0 | 1 | 2 | ...        the next forward waits for the last copy

    This is ZeRO-Offload (Ren et al., 2021, arXiv:2101.06840) without its one-step delay. The norm, the clipping and the
    decision to take the step come first, so the results equal those of a step on the device with the same kernels.
    """

    is_onloaded_automatically = True

    def __init__(self, parts: Parts, streams: movers.Streams, bucket_bytes: int, counters: Mapping[Part, Moved]) -> None:
        super().__init__(counters["masters"])
        self._where = Where.AWAY
        self._gradient_counters = counters["optimizer_states"]
        self._store = parts.store
        self._device = parts.world.device
        self._streams = streams
        self._bucket_bytes = bucket_bytes
        self._buckets: list[OptimizerBucket] = []
        self._host_memories: list[HostMemory] = []
        self._weight_copies: dict[int, movers.TimedCopies] = {}
        parts.events.step_in_buckets = self._step

    def _step(self, params: Sequence[OptimizerParam]) -> Iterator[Sequence[OptimizerParam]]:
        """Yields each bucket when its gradients are on the host. After the caller has updated it, sends its weights to the
        device. Finally waits for all copies.
        """
        self._build_buckets(params)
        streams = self._streams
        streams.to_host.wait_for_device()  # gradients are copied only after they are clipped
        streams.to_device.wait_for_device()  # weights are written only after the backward has read them
        fetches = [self._fetch(index) for index in range(min(NUM_HOST_BUCKETS, len(self._buckets)))]
        try:
            for index, bucket in enumerate(self._buckets):
                fetches[index].finish(self._gradient_counters, to_host=True)
                for param, host_gradient in zip(bucket.params, bucket.gradients, strict=True):
                    param.parameter.grad = host_gradient.to(param.parameter.dtype) if param.param in self._store else None
                yield bucket.params
                for param, host_gradient in zip(bucket.params, bucket.gradients, strict=True):
                    if host_gradient.dtype != param.parameter.dtype:  # frees the converted copy before the next bucket's
                        param.parameter.grad = None
                self._send(index)
                if index + NUM_HOST_BUCKETS < len(self._buckets):
                    fetches.append(self._fetch(index + NUM_HOST_BUCKETS))
        except BaseException:  # if the optimizer fails, earlier buckets stay updated
            streams.wait()  # the next step may write gradients, or have other buckets
            self._weight_copies.clear()
            raise
        streams.to_device.record().make_device_wait()
        for sent in self._weight_copies.values():
            sent.finish(self._counters, to_host=False)
        self._weight_copies.clear()

    def _fetch(self, index: int) -> movers.TimedCopies:
        """Starts to copy the gradients of bucket `index` to the host, and returns the copies."""
        start_s, num_bytes = time.perf_counter(), 0
        for param, host_gradient in zip(self._buckets[index].params, self._buckets[index].gradients, strict=True):
            if param.param in self._store:
                gradient = self._store.part(param.param)
                self._streams.to_host.copy(host_gradient, gradient)
                num_bytes += gradient.nbytes
        self._gradient_counters.copied_out += num_bytes
        return movers.TimedCopies(self._streams.to_host.record(), start_s, num_bytes)

    def _send(self, index: int) -> None:
        """Casts the weights of bucket `index` to the dtype of the device's weights, and starts to copy them to the device."""
        bucket, _, weights = self._buckets[index]
        masters = [param.parameter.detach() for param in bucket]
        if index % NUM_HOST_BUCKETS in self._weight_copies:
            self._weight_copies[index % NUM_HOST_BUCKETS].finish(self._counters, to_host=False)
        if bucket[0].original.dtype == masters[0].dtype and not self._device.is_async:
            weights = masters
        else:
            torch._foreach_copy_(weights, masters)
        start_s = time.perf_counter()
        for param, value in zip(bucket, weights, strict=True):
            self._streams.to_device.copy(param.working, value)
        num_bytes = sum(value.nbytes for value in weights)
        self._counters.copied_in += num_bytes
        self._weight_copies[index % NUM_HOST_BUCKETS] = movers.TimedCopies(self._streams.to_device.record(), start_s, num_bytes)

    def _build_buckets(self, params: Sequence[OptimizerParam]) -> None:
        """Builds the buckets and their host memory, in the first step and when the number of weights has changed."""
        if sum(len(bucket.params) for bucket in self._buckets) == len(params):
            return
        buckets = movers.split_params(params, self._bucket_bytes)
        self._host_memories.clear()
        gradients = self._allocate_views(buckets, self._store.dtype)
        weights = self._allocate_views(buckets, params[0].original.dtype)
        self._gradient_counters.host_bytes = sum(memory.num_bytes for memory in self._host_memories)
        self._buckets = [OptimizerBucket(*fields) for fields in zip(buckets, gradients, weights, strict=True)]

    def _allocate_views(self, buckets: Sequence[Sequence[OptimizerParam]], dtype: torch.dtype) -> list[list[torch.Tensor]]:
        """Returns host tensors of `dtype` in the shapes of each bucket's weights. Every second bucket uses the same memory."""
        alignment = ALIGNMENT_BYTES // dtype.itemsize
        layouts = [FlatLayout([param.parameter.shape for param in bucket], alignment) for bucket in buckets]
        num_bytes = max(layout.numel for layout in layouts) * dtype.itemsize
        ring = [self._device.host_memory(num_bytes) for _ in range(NUM_HOST_BUCKETS)]
        self._host_memories += ring
        flats = cycle([memory.data.view(dtype) for memory in ring])
        return [layout.views(flat[: layout.numel]) for layout, flat in zip(layouts, flats, strict=False)]


class HostOffloadManager(OffloadManager):
    """Moves the parts that its table names to host memory and back. With `when = "between_steps"`, optimizer states are on the
    device only while their weights are updated. `memory.host_optimizer` keeps optimizer states and master weights on the host.
    All other parts move only when the program asks. An estimate, whose tensors have no memory, does not attach the manager,
    which then moves nothing.
    """

    def __init__(self, config: OffloadConfig) -> None:
        self.config = config
        self._moved: dict[Part, Moved] = {part: Moved() for part in config.moves}
        self._movers: dict[Part, movers.Mover] = {part: movers.Mover(moved) for part, moved in self._moved.items()}
        self._layers: Sequence[Layer] = ()
        self._hooks: list[RemovableHandle] = []
        self._streams: movers.Streams | None = None

    @property
    def parts(self) -> Sequence[Part]:
        return self.config.moves

    def attach(self, parts: Parts, inventory: MemoryInventory) -> None:
        """Creates the copy streams, the host memory, and a mover for each part."""
        device = parts.world.device
        self._streams = movers.Streams(device.copy_stream)
        if isinstance(self.config, HostOptimizerConfig):
            optimizer = HostOptimizer(parts, self._streams, self.config.bucket_bytes, self._moved)
            self._movers = dict.fromkeys(self.parts, optimizer)
            return
        budget_mb = self.config.host_budget_mb
        max_locked_bytes = inf if budget_mb is None else budget_mb * 10**6
        arena = HostArena(device.host_memory, self._streams.wait, max_locked_bytes=max_locked_bytes)
        self._layers = parts.layers
        for layer in parts.layers:
            # A program's own backward may gather shards after they have been offloaded. In steps and evaluations, no rank
            # has hooks.
            check = partial(self._check_layers, "a use of a layer's weights")
            parts.waits.before_layer(layer.name, check, lambda: bool(self._hooks))
        for part in self.parts:
            self._movers[part] = self._new_mover(part, parts, inventory, arena)

    def _new_mover(self, part: Part, parts: Parts, inventory: MemoryInventory, arena: HostArena) -> movers.Mover:
        """Returns the mover for `part`."""
        assert self._streams is not None, "not attached"
        counters, bucket_bytes = self._moved[part], self.config.bucket_bytes
        if part == "gradients":
            return movers.GradientMover(inventory, counters)
        if part == "pools":
            return movers.PoolMover(inventory.trim, counters)
        if part == "optimizer_states" and self.config.steps_in_buckets:
            return BucketedStateMover(inventory, parts, self._streams, arena, bucket_bytes, counters)

        def list_storages() -> Sequence[StorageEntry]:
            storages = inventory.storages(part)
            return movers.merge_small(storages, bucket_bytes) if part == "optimizer_states" else storages

        return movers.HostCopyMover(list_storages, self._streams, arena, bucket_bytes, counters)

    def offload(self, part: Part) -> Callable[[], None]:
        """Starts to offload `part`, and returns a function that waits for the copies. Calls of layers raise StateError
        `memory-away` while weights or buffers are away.
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

    def host(self, part: Part) -> Mapping[int, torch.Tensor]:
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
        """Adds hooks that call `_check_layers` before each module's forward, `state_dict` and `load_state_dict`, unless the
        hooks exist.
        """
        forward, save, load = (
            partial(lambda use, *_: self._check_layers(use), f"a layer's {use}")
            for use in ("forward", "`state_dict`", "`load_state_dict`")
        )
        for layer in () if self._hooks else self._layers:
            for module in layer.module.modules():
                self._hooks.append(module.register_forward_pre_hook(forward, prepend=True))
                self._hooks.append(module.register_state_dict_pre_hook(save))  # type: ignore[no-untyped-call]
                self._hooks.append(module.register_load_state_dict_pre_hook(load))  # type: ignore[no-untyped-call]

    def _unhook_layers(self) -> None:
        """Removes the hooks if weights and buffers are on the device, so that they do not slow down calls."""
        if all(self._movers[part].where is Where.HERE for part in LAYER_PARTS if part in self._movers):
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()

    def _check_layers(self, label: str) -> None:
        """Calls `require` for weights and buffers. label: the use of the layer, for the error."""
        for part in LAYER_PARTS:
            if part in self._movers:
                self.require(part, label)

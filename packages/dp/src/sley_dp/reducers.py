"""The reducers, which sum each bucket of gradients as soon as its last gradient is complete.

A bucket is a slice of the gradient store, so it is summed in place, and the optimizer reads the sum there. Buckets are filled
in reverse order of use, which is the order in which the store reports gradients.

`dp.bucketed`, after PyTorch's DistributedDataParallel (Li et al., 2020, section 3.2):

    backward   |---- block 7 ----|---- block 6 ----|---- block 5 ----| ...
    reduction                    |-- bucket 0 --|  |-- bucket 1 --|

`dp.sharded`, in which ranks that hold the same weights share the optimizer's work and states (ZeRO stage 1: Rajbhandari,
Rasley, Ruwase, He, 2020, section 5.1). Its buckets are planned only once, since master weights and optimizer states have the
same layout:

    backward   |---- block 7 ----|---- block 6 ----| ...      update      next forward  |---- block 0 ----|---- block 1 ----|
    reduce-scatter               |-- bucket 0 --|  ...    local shard only  all-gather  |-- bucket n --|  |-- bucket n-1 --|
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from sley_core.api.comm import Group, SentBytes, Work
from sley_core.api.parts import BufferShard, GradientBuffer, Layout, Param, Parts, StepState, Sums, split_by_size
from sley_core.errors import RunError
from sley_core.protocols import GradientHandler
from sley_dp.plugin import SUMS_CHANNEL, WEIGHTS_CHANNEL, BucketedConfig, ShardedConfig, shards_axis
from sley_dp.sums import AllReduceSums, Bf16Sums, ShardSums


class BucketedReducer(GradientHandler):
    """Sums each gradient over its reduce group once per optimizer step, overlapped with the last backward. The sums equal sums
    by `core.each`. With `reduction = "bf16"`, their relative error is at most 2^-7, unless terms cancel.
    """

    def __init__(self, config: BucketedConfig) -> None:
        self._config = config
        self._sent = SentBytes()
        self._last_params: set[Param] = set()

    def attach(self, parts: Parts) -> None:
        self._store = parts.store
        self._groups = parts.groups
        self.sums: Sums = Bf16Sums(self._sent)
        if self._config.reduction != "bf16":
            self.sums = parts.store.reduction.sums(parts.store, self._sent) or AllReduceSums(self._sent)
        self._store.lay_out(self._plan_layout)

    def begin_step(self, step: StepState) -> None:
        """Discards the sums of a failed step. Finds each bucket's last parameter, since parameters may have been frozen."""
        self.sums.discard()
        self._sent.begin_step()
        self._last_params = find_last_params(self._store.buffers)

    def gradient_ready(self, param: Param, step: StepState) -> None:
        """Starts to sum the bucket of `param` if all other gradients in the bucket are complete. All ranks of a reduce group
        call this in the same order.
        """
        if param in self._last_params:
            buffer = self._store.buffer_of(param)
            assert buffer is not None, param
            self.sums.start(buffer, self._groups[buffer.reduce_group])

    def finish_step(self, step: StepState) -> None:
        self.sums.finish()
        self._sent.end_step()

    def counts(self) -> dict[str, float]:
        """Returns the number of bytes that this rank sent for the sums of the last step."""
        return self._sent.counts()

    def _plan_layout(self, params: list[Param]) -> Layout:
        """Returns a layout in which each bucket holds parameters of one family, in the order of `params`."""
        families, unreduced = split_by_family(params, self._groups)
        size_of, bucket_bytes = self._store.aligned_bytes, self._config.bucket_bytes
        buckets = [bucket for family in families for bucket in split_by_size(family, size_of, bucket_bytes)]
        return Layout(buckets, params, unreduced)


def find_last_params(buffers: Iterable[GradientBuffer]) -> set[Param]:
    """Returns each bucket's parameter with the lowest index, whose gradient is the last in the bucket to be complete."""
    return {min(buffer.params, key=lambda param: param.index) for buffer in buffers}


def split_by_family(params: Iterable[Param], groups: Mapping[str, Group]) -> tuple[list[list[Param]], list[Param]]:
    """Returns lists of parameters that may share buckets, and the parameters whose reduce group has only one rank."""
    families: dict[tuple[object, ...], list[Param]] = {}
    unreduced: list[Param] = []
    for param in params:
        is_reduced = groups[param.reduce_group].size > 1
        (families.setdefault(param.family, []) if is_reduced else unreduced).append(param)
    return list(families.values()), unreduced


class WeightGathers:
    """All-gathers weight buffers in place, as a `Completion` for `parts.weights`.

        update ──> start ──> layer 0 waits for its buffers ──> layer 1 ... ──> finish ──> update

    gradients: the sharded gradient buffers in forward order, which must be the same on all ranks that share a copy of the
    optimizer states. buffers: the weight buffers of the same parameters, each with this rank's shard.
    """

    def __init__(self, parts: Parts, gradients: Sequence[GradientBuffer]) -> None:
        weights = parts.weights.lay_out([(buffer.params, buffer.num_shards) for buffer in gradients])
        shards = [buffer.shard for buffer in gradients if buffer.shard]
        self.buffers = list(zip(weights, shards, strict=True))
        self._groups = parts.groups
        self._gathers: dict[int, Work] = {}
        self._sends: list[Work] = []

    def start(self) -> None:
        """Finishes earlier gathers and starts to gather all buffers. Shards must not be written until `finish` returns."""
        self.finish()
        for index, (buffer, shard) in enumerate(self.buffers):
            start, end = shard.bounds(buffer.data.numel())
            # The gather runs on a separate channel, over the ranks that share a copy. All of them make the same updates first
            # and gather the buffers in the same order.
            transport = self._groups[shard.axis].transport(WEIGHTS_CHANNEL)
            label = f"the weights from {buffer.params[0].name} on"
            self._gathers[index] = transport.all_gather([buffer.data], [buffer.data[start:end]], label=label)

    def is_due(self, indices: Iterable[int]) -> bool:
        """Returns whether the gather of any of the buffers with these indices has started, and `wait_for` has not waited for it
        yet. The result depends only on earlier calls, not on arrived data, so it is the same on all ranks.
        """
        return any(index in self._gathers for index in indices)

    def wait_for(self, indices: Iterable[int]) -> None:
        """Blocks until the buffers with these indices are complete."""
        for index in indices:
            work = self._gathers.get(index)
            if work is not None:
                work.wait()  # if it fails, the buffer is incomplete, and each later call raises the error again
                self._sends.append(self._gathers.pop(index))

    def wait(self) -> None:
        """Blocks until all buffers are complete."""
        self.wait_for(range(len(self.buffers)))

    def finish(self) -> None:
        """Blocks until all buffers are complete and no other rank still reads from them."""
        self.wait()
        for work in self._sends:
            work.wait_sent()
        self._sends.clear()


class ShardedReducer(GradientHandler):
    """Sums gradients into one shard per rank, and gathers the updated weights from all ranks before their next use."""

    def __init__(self, config: ShardedConfig) -> None:
        self._config = config

    def attach(self, parts: Parts) -> None:
        """Lays out gradients and weights in the same buckets, and makes layers wait for their weights."""
        self._parts = parts
        parts.store.lay_out(self._plan_layout)
        self._last_params = find_last_params(parts.store.buffers)
        shard_sums = ShardSums(parts.groups, is_async=parts.world.device.is_async)
        self.sums: Sums = parts.store.reduction.sums(parts.store, SentBytes(), SUMS_CHANNEL) or shard_sums
        # Buckets are in backward order, gathers in forward order.
        self.gathers = WeightGathers(parts, parts.store.buffers[::-1])
        parts.weights.add_completion(self.gathers)
        index_of_param = {param: index for index, (buffer, _) in enumerate(self.gathers.buffers) for param in buffer.params}
        for layer in parts.layers:
            names = [name for name, _ in layer.module.named_parameters(layer.name, remove_duplicate=False)]
            params = dict.fromkeys(parts.registry[name] for name in names)
            indices = sorted({index_of_param[param] for param in params if param in index_of_param})
            if indices:
                is_due = partial(self.gathers.is_due, indices)
                parts.waits.before_layer(layer.name, partial(self.gathers.wait_for, indices), is_due)

    def begin_step(self, step: StepState) -> None:
        self.sums.discard()

    def gradient_ready(self, param: Param, step: StepState) -> None:
        """Starts to sum the bucket of `param` if all other gradients in the bucket are complete. All ranks of a reduce group
        call this in the same order.
        """
        if param in self._last_params:
            buffer = self._parts.store.buffer_of(param)
            assert buffer is not None, param
            assert buffer.shard is not None, "a bucket of `dp.sharded` has no shard"
            buffer.has_full_gradients = False
            self.sums.start(buffer, self._parts.groups[buffer.shard.axis])

    def finish_step(self, step: StepState) -> None:
        """Blocks until this rank's shards hold their sums and no peer reads this rank's weights any more."""
        self.sums.finish()
        self.gathers.finish()  # also for layers that were not called in this step

    def detach(self) -> None:
        """Waits for the gathers in flight. If another rank has failed, ignores the error."""
        with suppress(RunError):
            self.gathers.wait()

    def _plan_layout(self, params: list[Param]) -> Layout:
        """Returns a layout with the buckets of `dp.bucketed` and this rank's shard of each. Parameters that are tied across
        stages are sorted by name, so that all their stages split them into the same shards.
        """
        families, unreduced = split_by_family(params, self._parts.groups)
        buckets, shards = [], []
        size_of = partial(self._parts.store.aligned_bytes, is_sharded=True)
        for family in families:
            is_tied = family[0].tie_axis is not None
            ordered = sorted(family, key=lambda param: param.name) if is_tied else family
            group = self._parts.groups[shards_axis(family[0].reduce_group)]
            for bucket in split_by_size(ordered, size_of, self._config.bucket_bytes):
                buckets.append(bucket)
                shards.append(BufferShard(group.axis, group.size, group.coord))
        is_fixed = any(self._parts.groups[axis].size > 1 for axis in ("stage", "wdp"))
        return Layout(buckets, params, unreduced, shards, is_fixed)

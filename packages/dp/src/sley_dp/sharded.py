"""`dp.sharded`: ranks that hold the same weights share the optimizer's work and states (ZeRO stage 1).

    backward   |---- block 7 ----|---- block 6 ----| ...      update      next forward  |---- block 0 ----|---- block 1 ----|
    reduce-scatter               |-- bucket 0 --|  ...     own part only   all-gather   |-- bucket n --|  |-- bucket n-1 --|

Rajbhandari, Rasley, Ruwase, He (2020), ZeRO, section 5.1. Buckets are planned once, since masters and states follow their
layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from sley_core.api.comm import SentBytes
from sley_core.api.parts import SHARD_ALIGNMENT, BufferShard, Layout, round_up, split_by_size
from sley_core.errors import RunError
from sley_core.protocols import GradientHandler
from sley_dp.bucketed import Bucket, assert_complete, broadcast_values, families_of
from sley_dp.config import SUMS, WEIGHTS, shards_axis
from sley_dp.sums import ShardSums

if TYPE_CHECKING:
    from sley_core.api.comm import Groups, Work
    from sley_core.api.parts import Param, Parts, StepState, Sums, WeightBuffer
    from sley_dp.config import ShardedConfig


class WeightGathers:
    """Gathers `buffers`, each in place, over the ranks of its shard; `parts.weights` asks for it (`Completion`).

    buffers: in the order in which forwards need them, the same on all ranks that share it.

    update | gathers start, the first layer's first | layer 0 waits for its buckets | layer 1 ... | finish, before the next
    update
    """

    def __init__(self, buffers: Sequence[tuple[WeightBuffer, BufferShard]], groups: Groups) -> None:
        self.buffers = buffers
        self._groups = groups
        self._active: dict[int, Work] = {}
        self._leaving: list[Work] = []

    def start(self) -> None:
        """Starts to gather every buffer; this rank's part must not be written until `finish`."""
        self.finish()
        for at, (buffer, shard) in enumerate(self.buffers):
            first, last = shard.bounds(buffer.data.numel())
            # Over the ranks that share a copy, on a separate lane, after the same updates, in the order of `buffers`.
            transport = self._groups[shard.axis].transport(WEIGHTS)
            what = f"the weights from {buffer.params[0].name} on"
            self._active[at] = transport.all_gather([buffer.data], [buffer.data[first:last]], what=what)

    def is_due(self, numbers: Iterable[int]) -> bool:
        """Returns whether `wait_for` would wait; depends only on the calls so far, so it is the same on all ranks that make the
        same calls.
        """
        return any(at in self._active for at in numbers)

    def wait_for(self, numbers: Iterable[int]) -> None:
        """Blocks until the buffers with these numbers are complete."""
        for at in numbers:
            work = self._active.pop(at, None)
            if work is not None:
                work.wait()
                self._leaving.append(work)

    def wait(self) -> None:
        """Blocks until all buffers are complete."""
        self.wait_for(range(len(self.buffers)))

    def finish(self) -> None:
        """Blocks until all buffers are complete and no other rank reads from them any more."""
        self.wait()
        for work in self._leaving:
            work.wait_sent()
        self._leaving.clear()


class Sharded(GradientHandler):
    """Leaves each rank its part of every sum to step; weights that other ranks step are all-gathered before their next use."""

    def __init__(self, config: ShardedConfig) -> None:
        self._config = config
        self.buckets: list[Bucket] = []
        self._bucket_of: dict[Param, Bucket] = {}

    def attach(self, parts: Parts) -> None:
        """Lays out gradients and weights in the same buckets, and makes layers wait for their weights.

        With `start = "broadcast"` copies the first replica's values, a collective on all ranks.
        """
        self._parts = parts
        parts.store.lay_out(self._plan)
        if self._config.start == "broadcast":
            broadcast_values(parts)
        self.buckets = [Bucket(buffer) for buffer in parts.store.buffers]
        self._bucket_of = {param: bucket for bucket in self.buckets for param in bucket.buffer.params}
        scatters = ShardSums(parts.groups, is_async=parts.world.device.is_async)
        self.sums: Sums = parts.store.reduction.sums(parts.store, SentBytes(), SUMS) or scatters
        buffers = [bucket.buffer for bucket in self.buckets][::-1]  # filled in the backward's order
        shards = [buffer.shard for buffer in buffers if buffer.shard]
        weights = parts.weights.lay_out([(buffer.params, buffer.num_shards) for buffer in buffers])
        self.gathers = WeightGathers(list(zip(weights, shards, strict=True)), parts.groups)
        parts.weights.completed_by(self.gathers)
        number_of = {param: at for at, (buffer, _) in enumerate(self.gathers.buffers) for param in buffer.params}
        for layer in parts.layers:
            names = [name for name, _ in layer.module.named_parameters(layer.name, remove_duplicate=False)]
            params = dict.fromkeys(parts.registry[name] for name in names)
            numbers = sorted({number_of[param] for param in params if param in number_of})
            if numbers:
                is_due = partial(self.gathers.is_due, numbers)
                parts.waits.before_layer(layer.name, partial(self.gathers.wait_for, numbers), is_due)

    def begin_step(self, step: StepState) -> None:
        """Ends the sums that a failed step left in flight, and resets the counts of missing gradients."""
        self.sums.forget()
        for bucket in self.buckets:
            bucket.missing = len(bucket.buffer.params)

    def gradient_ready(self, param: Param, step: StepState) -> None:
        """Starts the sum of the bucket of `param` if it is complete now. Called in one order on all ranks of the group."""
        bucket = self._bucket_of.get(param)
        if bucket is None:
            return
        bucket.missing -= 1
        if bucket.missing == 0:
            assert bucket.buffer.shard is not None, "a buffer that is not sharded has no parts to sum"
            bucket.buffer.is_whole = False
            self.sums.start(bucket.buffer, self._parts.groups[bucket.buffer.shard.axis])

    def finish_step(self, step: StepState) -> None:
        """Blocks until this rank's parts hold their sums, and its weights may be written."""
        assert_complete(self.buckets)
        self.sums.finish()
        self.gathers.finish()  # also those of layers that were not called in this step

    def detach(self) -> None:
        """Completes the weights, as far as other ranks still answer."""
        with suppress(RunError):
            self.gathers.wait()

    def _plan(self, params: list[Param]) -> Layout:
        """Returns buckets per family, filled in the order given, each with this rank's shard.

        Ties across stages are ordered by name, so that ranks of all stages that hold one have the same elements of it.
        """
        families, loose = families_of(params, self._parts.groups)
        buckets, shards = [], []
        for family in families:
            is_tied = family[0].tie_group is not None
            ordered = sorted(family, key=lambda param: param.name) if is_tied else family
            group = self._parts.groups[shards_axis(family[0].reduce_group)]
            for bucket in split_by_size(ordered, self._num_bytes, self._config.bucket_bytes):
                buckets.append(bucket)
                shards.append(BufferShard(group.axis, group.size, group.coord))
        is_fixed = any(self._parts.groups[axis].size > 1 for axis in ("stage", "wdp"))
        return Layout(buckets, params, loose, shards, is_fixed)

    def _num_bytes(self, param: Param) -> int:
        """Returns the bytes of `param` in a flat buffer, alignment included."""
        return round_up(param.numel, SHARD_ALIGNMENT) * self._parts.store.dtype.itemsize

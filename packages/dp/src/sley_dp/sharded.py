"""`dp.sharded`: ranks that hold the same weights share the optimizer's work and states (ZeRO stage 1).

    backward   |---- block 7 ----|---- block 6 ----| ...      update      next forward  |---- block 0 ----|---- block 1 ----|
    reduce-scatter               |-- bucket 0 --|  ...     own part only   all-gather   |-- bucket n --|  |-- bucket n-1 --|

Rajbhandari, Rasley, Ruwase, He (2020), ZeRO, section 5.1. Buckets are planned once, since masters and states follow their
layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_core.api.comm import SentBytes
from sley_core.api.parts import SHARD_ALIGNMENT, BufferShard, Layout, Sums, round_up, split_by_size
from sley_core.errors import RunError
from sley_core.protocols import GradientHandler
from sley_dp.bucketed import Bucket, described
from sley_dp.config import SUMS, WEIGHTS, copies_axis, shards_axis
from sley_dp.replicas import broadcast_values

if TYPE_CHECKING:
    from sley_core.api.comm import Group, Groups, Transport, Work
    from sley_core.api.parts import GradientBuffer, Param, Parts, StepState, WeightBuffer
    from sley_dp.config import ShardedConfig

MAX_SCRATCH = 2
"""Sums in flight at a time if data from peers needs scratch memory; this bounds that memory."""


class ShardSums(Sums):
    """Sums buffers of which every rank keeps one part, each into this rank's part of it.

        reduce-scatter over the ranks that share a copy ──> all-reduce of the part over the ranks that hold the same one

    The second is only needed if a copy is shared by fewer ranks than reduce together. Each start also advances the earlier
    sums, as far as that takes no waiting, in their order. is_async: whether the device runs ahead of the host; then second
    halves start in `finish`, at one place on all ranks.
    """

    def __init__(self, groups: Groups, *, is_async: bool) -> None:
        self._groups = groups
        self._is_async = is_async
        self._sums: list[_Sum] = []
        self._scratches: list[tuple[Tensor, _Sum]] = []

    def start(self, buffer: GradientBuffer, group: Group) -> None:
        """Starts to sum `buffer`, whose gradients are complete; from now on only this rank's part of it will be defined.

        group: the ranks that share a copy.
        """
        transport = group.transport(SUMS)
        copies = self._groups.get(copies_axis(buffer.reduce_group))
        scratch = self._scratch(buffer, transport.num_scratch_rows(buffer.own.numel()))
        # Over the ranks that share a copy, on a separate lane; they start their buckets in one order.
        work = transport.reduce_scatter([buffer.data], [scratch], what=described(buffer), contents=buffer.contents)
        self._sums.append(_Sum(buffer, work, copies.transport if copies else None))
        if scratch.numel():
            self._scratches.append((scratch, self._sums[-1]))
        if not self._is_async:
            self._advance()

    def finish(self) -> None:
        """Blocks until this rank's part of every started buffer holds the sum, and its padding zeros."""
        for under_way in self._sums:
            under_way.halve()
        for under_way in self._sums:
            under_way.wait()
        # After all sums: a peer that is slow to read one must not delay the others.
        for under_way in self._sums:
            under_way.wait_sent()
        self._sums.clear()
        self._scratches.clear()

    def forget(self) -> None:
        """Waits until nothing writes into a buffer any more: the sums of a step that failed are finished, and not used."""
        self.finish()

    def _advance(self) -> None:
        """Advances the sums without waiting, the oldest first, up to one whose second half may not start yet, so that these
        start in one order on all ranks.
        """
        for under_way in self._sums:
            if not under_way.advance():
                return

    def _scratch(self, like: GradientBuffer, numel: int) -> Tensor:
        """Returns `numel` elements of memory for what comes from peers, of the dtype of `like`. If MAX_SCRATCH sums in flight
        have some, waits for the oldest of these and takes over its memory if that is large enough.
        """
        if numel and len(self._scratches) == MAX_SCRATCH:
            scratch, oldest = self._scratches.pop(0)
            for under_way in self._sums[: self._sums.index(oldest) + 1]:
                under_way.halve()
            oldest.first.wait_sent()
            if scratch.numel() >= numel:
                return scratch[:numel]
        return torch.empty(numel, dtype=like.data.dtype, device=like.data.device)


class _Sum:
    """Holds the sum of one bucket in flight. copies: the transport of the ranks that hold the same part, if there are
    others.
    """

    def __init__(self, buffer: GradientBuffer, first: Work, copies: Callable[[], Transport] | None) -> None:
        self.buffer = buffer
        self.first = first
        self._copies = copies
        self._second: Work | None = None
        self._is_halved = False

    def advance(self) -> bool:
        """Advances as far as possible without waiting; returns whether the second half has begun, so that the next sum's
        may.
        """
        if not self._is_halved and self.first.test():
            self.halve()
        if self._second is not None:
            self._second.test()
        return self._is_halved

    def halve(self) -> None:
        """Waits for the reduce-scatter and starts the all-reduce of this rank's part, if one is needed."""
        if self._is_halved:
            return
        self._is_halved = True
        self.first.wait()
        if self._copies is not None:
            buffer = self.buffer
            # Over the ranks that hold the same part; they get here in the order in which the buckets were started.
            self._second = self._copies().all_reduce(buffer.own, what=described(buffer), contents=buffer.contents)

    def wait(self) -> None:
        """Blocks until this rank's part holds the sum."""
        if self._second is not None:
            self._second.wait()
        self.buffer.zero_padding()

    def wait_sent(self) -> None:
        """Blocks until peers have read what this rank gave."""
        self.first.wait_sent()
        if self._second is not None:
            self._second.wait_sent()


class WeightGathers:
    """Gathers `buffers`, each in place, over the ranks of its shard; `parts.weights` asks for it (`Completion`).

    buffers: in the order in which forwards need them, the same on all ranks that share it.

    update | gathers start, the first layer's first | layer 0 waits for its buckets | layer 1 ... | finish, before the next
    update
    """

    def __init__(self, buffers: Sequence[tuple[WeightBuffer, BufferShard]], groups: Groups) -> None:
        self.buffers = buffers
        self._groups = groups
        self._under_way: dict[int, Work] = {}
        self._leaving: list[Work] = []

    def start(self) -> None:
        """Starts to gather every buffer; this rank's part must not be written until `finish`."""
        self.finish()
        for at, (buffer, shard) in enumerate(self.buffers):
            # Over the ranks that share a copy, on a separate lane, after the same updates, in the order of `buffers`.
            transport = self._groups[shard.axis].transport(WEIGHTS)
            what = f"the weights from {buffer.params[0].name} on"
            self._under_way[at] = transport.all_gather([buffer.data], [own_part(buffer, shard)], what=what)

    def is_due(self, numbers: Iterable[int]) -> bool:
        """Returns whether `wait_for` would wait; depends only on the calls so far, so it is the same on all ranks that make the
        same calls.
        """
        return any(at in self._under_way for at in numbers)

    def wait_for(self, numbers: Iterable[int]) -> None:
        """Blocks until the buffers with these numbers are complete."""
        for at in numbers:
            work = self._under_way.pop(at, None)
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


def own_part(buffer: WeightBuffer, shard: BufferShard) -> Tensor:
    """Returns the part of the buffer that this rank steps, flat: a view."""
    first, last = shard.bounds(buffer.data.numel())
    return buffer.data[first:last]


class Sharded(GradientHandler):
    """Leaves each rank its part of every sum to step; weights that other ranks step are all-gathered before their next use."""

    def __init__(self, config: ShardedConfig) -> None:
        self._cap_bytes = config.bucket_mb * (1 << 20)
        self._start = config.start
        self.buckets: list[Bucket] = []
        self._bucket_of: dict[Param, Bucket] = {}

    def attach(self, parts: Parts) -> None:
        """Lays out gradients and weights in the same buckets, and makes layers wait for their weights.

        With `start = "broadcast"` copies the first replica's values, a collective on all ranks.
        """
        self._parts = parts
        parts.store.lay_out(self._plan)
        if self._start == "broadcast":
            broadcast_values(parts)
        self.buckets = [Bucket(buffer) for buffer in parts.store.buffers]
        self._bucket_of = {param: bucket for bucket in self.buckets for param in bucket.buffer.params}
        scatters = partial(ShardSums, parts.groups, is_async=parts.world.device.is_async)
        self.sums = parts.store.reduction.sums(parts.store, scatters, SentBytes(), SUMS)
        buffers = [bucket.buffer for bucket in self.buckets][::-1]  # filled in the backward's order
        shards = [buffer.shard for buffer in buffers if buffer.shard]
        weights = parts.weights.lay_out([(buffer.params, buffer.num_shards) for buffer in buffers])
        self.gathers = WeightGathers(list(zip(weights, shards, strict=True)), parts.groups)
        parts.weights.completed_by(self.gathers)
        self._let_layers_wait(parts)

    def begin_step(self, step: StepState) -> None:
        """Ends what a failed step left in flight, and resets the counts of missing gradients."""
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
            assert bucket.buffer.shard is not None, "a buffer that is not sharded is no reducer's of shards"
            bucket.buffer.is_whole = False
            self.sums.start(bucket.buffer, self._parts.groups[bucket.buffer.shard.axis])

    def finish_step(self, step: StepState) -> None:
        """Blocks until this rank's parts hold their sums, and its weights may be written; asserts that every gradient was
        complete.
        """
        for bucket in self.buckets:
            assert bucket.missing == 0, f"{bucket.missing} gradients of {bucket.buffer.params} never came"
        self.sums.finish()
        self.gathers.finish()  # those of layers that were not called in this step, too

    def detach(self) -> None:
        """Completes the weights, as far as other ranks still answer."""
        with suppress(RunError):
            self.gathers.wait()

    def _plan(self, params: list[Param]) -> Layout:
        """Returns buckets per family, filled in the order given, each with this rank's shard.

        Ties across stages are ordered by name, so that ranks of all stages that hold one have the same elements of it.
        Parameters whose reduce group has one rank lie in no bucket, and are stepped in full.
        """
        families: dict[tuple[object, ...], list[Param]] = {}
        loose: list[Param] = []
        for param in params:
            alone = self._parts.groups[param.reduce_group].size == 1
            (loose if alone else families.setdefault(param.family, [])).append(param)
        buckets, shards = [], []
        for family in families.values():
            is_tied = family[0].tie_group is not None
            ordered = sorted(family, key=lambda param: param.name) if is_tied else family
            group = self._parts.groups[shards_axis(family[0].reduce_group)]
            for bucket in split_by_size(ordered, self._num_bytes, self._cap_bytes):
                buckets.append(bucket)
                shards.append(BufferShard(group.axis, group.size, group.coord))
        is_fixed = any(self._parts.groups[axis].size > 1 for axis in ("stage", "wdp"))
        return Layout(buckets, params, loose, shards, is_fixed)

    def _num_bytes(self, param: Param) -> int:
        """Returns the bytes of `param` in a flat buffer, alignment included."""
        return round_up(param.numel, SHARD_ALIGNMENT) * self._parts.store.dtype.itemsize

    def _let_layers_wait(self, parts: Parts) -> None:
        """Registers, for each layer of this rank, to wait for the buffers that hold one of its weights."""
        number_of = {param: at for at, (buffer, _) in enumerate(self.gathers.buffers) for param in buffer.params}
        for layer in parts.layers:
            names = [name for name, _ in layer.module.named_parameters(layer.name, remove_duplicate=False)]
            held = dict.fromkeys(parts.registry[name] for name in names)
            numbers = sorted({number_of[param] for param in held if param in number_of})
            if numbers:
                is_due = partial(self.gathers.is_due, numbers)
                parts.waits.before_layer(layer.name, partial(self.gathers.wait_for, numbers), is_due)

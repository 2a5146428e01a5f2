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
from sley_core.api.parts import SHARD_ALIGNMENT, Cut, Layout, TreeSums
from sley_core.errors import RunError
from sley_core.protocols import GradientHandler
from sley_dp.config import SUMS, WEIGHTS, shards_axis
from sley_dp.reducer import Bucket, fill
from sley_dp.replicas import broadcast_values
from sley_dp.scatter import ShardSums

if TYPE_CHECKING:
    from torch import Tensor

    from sley_core.api.comm import Groups, Work
    from sley_core.api.parts import Cut, Param, Parts, StepState, WeightBuffer
    from sley_dp.bucketed import Sums
    from sley_dp.config import ShardedConfig


class WeightGathers:
    """Gathers `buffers`, each in place, over the ranks of its cut; `parts.weights` asks for it (`Completion`).

    buffers: in the order in which forwards need them, the same on all ranks of a cut.

    update | gathers start, the first layer's first | layer 0 waits for its buckets | layer 1 ... | finish, before the next
    update
    """

    def __init__(self, buffers: Sequence[tuple[WeightBuffer, Cut]], groups: Groups) -> None:
        self.buffers = buffers
        self._groups = groups
        self._under_way: dict[int, Work] = {}
        self._leaving: list[Work] = []

    def start(self) -> None:
        """Starts to gather every buffer; this rank's part must not be written until `finish`."""
        self.finish()
        for at, (buffer, cut) in enumerate(self.buffers):
            # Over the ranks that share a copy, on a separate lane, after the same updates, in the order of `buffers`.
            transport = self._groups[cut.axis].transport(WEIGHTS)
            what = f"the weights from {buffer.params[0].name} on"
            self._under_way[at] = transport.all_gather([buffer.data], [own_part(buffer, cut)], what=what)

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


def own_part(buffer: WeightBuffer, cut: Cut) -> Tensor:
    """Returns the part of the buffer that this rank steps, flat: a view."""
    first, last = cut.bounds(buffer.data.numel())
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
        self.sums: Sums = ShardSums(parts.groups, is_async=parts.world.device.is_async)
        if parts.store.canonical is not None:
            self.sums = TreeSums(parts.store, SentBytes(), SUMS)
        buffers = [bucket.buffer for bucket in self.buckets][::-1]  # filled in the backward's order
        cuts = [buffer.cut for buffer in buffers if buffer.cut]
        weights = parts.weights.lay_out([(buffer.params, buffer.num_shards) for buffer in buffers])
        self.gathers = WeightGathers(list(zip(weights, cuts, strict=True)), parts.groups)
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
            assert bucket.buffer.cut is not None, "a buffer that is not cut is no reducer's of shards"
            bucket.buffer.is_whole = False
            self.sums.start(bucket.buffer, self._parts.groups[bucket.buffer.cut.axis])

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
        """Returns buckets per family, filled in the order given, each with this rank's cut.

        Ties across stages are ordered by name, so that ranks of all stages that hold one have the same elements of it.
        Parameters whose reduce group has one rank lie in no bucket, and are stepped in full.
        """
        families: dict[tuple[object, ...], list[Param]] = {}
        loose: list[Param] = []
        for param in params:
            alone = self._parts.groups[param.reduce_group].size == 1
            (loose if alone else families.setdefault(param.family, [])).append(param)
        buckets, cuts = [], []
        for family in families.values():
            is_tied = family[0].tie_group is not None
            ordered = sorted(family, key=lambda param: param.name) if is_tied else family
            group = self._parts.groups[shards_axis(family[0].reduce_group)]
            for bucket in fill(ordered, self._num_bytes, self._cap_bytes):
                buckets.append(bucket)
                cuts.append(Cut(group.axis, group.size, group.coord))
        is_fixed = any(self._parts.groups[axis].size > 1 for axis in ("stage", "wdp"))
        return Layout(buckets, params, loose, cuts, is_fixed)

    def _num_bytes(self, param: Param) -> int:
        """Returns the bytes of `param` in a flat buffer, alignment included."""
        return -(-param.numel // SHARD_ALIGNMENT) * SHARD_ALIGNMENT * self._parts.store.dtype.itemsize

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

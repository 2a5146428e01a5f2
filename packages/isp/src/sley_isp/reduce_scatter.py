"""Reduce-scatter of weight gradients, from full tensors to shards.

lease ──> products written ──> sent and received ──> local rows summed ──> store.add ──> lease ends
          `add`                in the background     `advance`             `finish`, at the limit of reductions in flight
                                                                           or at the end of a pass

A bucket holds the gradients of one parameter group. With one reduction per microbatch, it is sent when the backward continues
with another group. With one reduction per step, it is sent after the last action that can add to it, which saves exchanges but
needs memory for all full gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_core.api.comm import checksum
from sley_core.api.parts import ALIGNMENT_BYTES, FlatLayout
from sley_isp.param_group import padded_shape, remove_padding

if TYPE_CHECKING:
    from sley_core.api.comm import Group, Work
    from sley_core.api.parts import Param, Parts
    from sley_core.protocols import MemoryPool
    from sley_isp.communicator import Counters
    from sley_isp.param_group import ParamGroup

WriteGradient = Callable[[Tensor, bool], None]
"""Writes a gradient into a tensor of the store's dtype, or adds the gradient if the flag is true."""


@dataclass(eq=False)
class Bucket:
    """Describes parameters whose gradients are reduced in one exchange.

    number: the bucket's index in layer order. group: the group of the parameters. chunks: the chunks that use the parameters,
    for one reduction per step. users: the groups whose backwards add to each parameter's gradient.
    """

    number: int
    group: ParamGroup
    chunks: frozenset[int]
    users: dict[Param, set[ParamGroup]] = field(default_factory=dict)


@dataclass(eq=False)
class OpenBucket:
    """Holds the gradients of a bucket until its reduction starts.

    full_gradients: the full gradients with padding. written_params: the parameters whose full gradients have been written.
    """

    bucket: Bucket
    full_gradients: dict[Param, Tensor]
    lease: ExitStack
    written_params: set[Param] = field(default_factory=set)


@dataclass(eq=False)
class Reduction:
    """Holds the reduction of a bucket that is in flight.

    rows: this rank's rows of each gradient, which hold the sum once `handles` are done. If the order of sums is fixed, `rows`
    are instead [size, ...] with the rows of every rank, for the microbatches `microbatches`.
    """

    bucket: Bucket
    handles: list[Work]
    rows: dict[Param, Tensor]
    lease: ExitStack
    microbatches: range | None = None


class GradientReducer:
    """Reduces full gradients over `group`, and adds this rank's rows to the store of `parts`.

    max_in_flight: the maximum number of reductions in flight, or 0 to wait for each at once. per_step: whether to reduce once
    per step, after the last action that can add to a bucket. If so, a parameter of several groups is only in the bucket of the
    first group. Otherwise, it is in a bucket of each group.
    """

    def __init__(
        self, max_in_flight: int, parts: Parts, pool: MemoryPool, group: Group, counters: Counters, *, per_step: bool
    ) -> None:
        self.max_in_flight = max_in_flight
        self.per_step = per_step
        self.store = parts.store
        self.pool = pool
        self.group = group
        self.counters = counters
        self._group_of_param: dict[Param, ParamGroup] = {}
        self._buckets: dict[tuple[ParamGroup, frozenset[int]], Bucket] = {}
        self._open_buckets: dict[Bucket, OpenBucket] = {}
        self._reductions: deque[Reduction] = deque()
        self._current: ParamGroup | None = None
        self._passed_groups: set[ParamGroup] = set()

    def register(self, group: ParamGroup, params: Collection[Param]) -> None:
        """Assigns `params` of `group` to buckets. Must be called for all modules before the first `add`."""
        for param in params:
            bucket_group = self._group_of_param.setdefault(param, group) if self.per_step else group
            key = bucket_group, param.chunks if self.per_step else frozenset()
            bucket = self._buckets.setdefault(key, Bucket(len(self._buckets), bucket_group, param.chunks))
            bucket.users.setdefault(param, set()).add(group)

    def add(self, group: ParamGroup, param: Param, write: WriteGradient) -> None:
        """Adds to the gradient of `param` in a backward of `group`. May start or finish earlier reductions.

        write: writes the contribution into the full gradient, or adds it. All ranks must pass the groups in the same order. The
        data may decide which modules of a group contribute, so they do not show when a bucket is complete.
        """
        self.advance()
        if group is not self._current:
            # Compares groups, not buckets. A tied weight may be in the bucket of another layer, and the data may decide how
            # often a backward alternates between the two layers.
            if self._current is not None:
                self._passed_groups.add(self._current)
            self._current = group
            for open_bucket in self._ordered_buckets():
                if not self.per_step or (self._is_last_action(open_bucket.bucket) and self._is_complete(open_bucket)):
                    self._start_reduction(open_bucket)
        bucket = self._buckets[(self._group_of_param[param], param.chunks) if self.per_step else (group, frozenset())]
        open_bucket = self._open_buckets.get(bucket) or self._open(bucket)
        write(remove_padding(open_bucket.full_gradients[param], param), param in open_bucket.written_params)
        open_bucket.written_params.add(param)

    def flush(self, *, all_buckets: bool = False) -> None:
        """Starts the reduction of every bucket to which no later action can add. Called at the end of an action.

        all_buckets: whether to reduce all buckets, for a backward outside a step, whose last contribution is not known.
        """
        for open_bucket in self._ordered_buckets():
            if all_buckets or not self.per_step or self._is_last_action(open_bucket.bucket):
                self._start_reduction(open_bucket)
        self._current = None
        self._passed_groups.clear()

    def advance(self) -> None:
        """Sums the data that have arrived, so that faster peers do not wait for this rank. Never blocks.

        Only `finish` adds the sums to the store, since the store may start collectives, which need the same order on all ranks.
        """
        for reduction in self._reductions:
            are_done = [handle.test() for handle in reduction.handles]  # a list, since `test` advances each handle
            if all(are_done):
                for handle in reduction.handles:
                    handle.wait()

    def finish(self, max_remaining: int = 0) -> None:
        """Waits for the oldest reductions and adds their sums to the store, until `max_remaining` are in flight."""
        while len(self._reductions) > max_remaining:
            reduction = self._reductions.popleft()
            for handle in reduction.handles:
                handle.wait()  # if this raises, a peer may still read the buffer, so the lease does not end
            try:
                for param, rows in reduction.rows.items():
                    if reduction.microbatches is None:
                        self.store.add(param, rows)
                    else:
                        rows_by_microbatch = dict(zip(reduction.microbatches, rows, strict=True))
                        self.store.add_microbatches(param, rows_by_microbatch, reduction.bucket.group.layer)
            finally:
                self._release(reduction)

    def discard(self) -> None:
        """Waits for all reductions of a failed step and discards their sums."""
        for open_bucket in self._open_buckets.values():
            open_bucket.lease.close()
        self._open_buckets.clear()
        self._current = None
        self._passed_groups.clear()
        while self._reductions:
            self._release(self._reductions.popleft())

    def _ordered_buckets(self) -> list[OpenBucket]:
        """Returns the open buckets, later layers first, since the order in which they were opened may depend on the data."""
        return sorted(self._open_buckets.values(), key=lambda open_bucket: -open_bucket.bucket.number)

    def _is_last_action(self, bucket: Bucket) -> bool:
        """Returns whether no later action of this list can add to `bucket`."""
        return self.store.state.is_last_of_list(bucket.chunks)

    def _is_complete(self, open_bucket: OpenBucket) -> bool:
        """Returns whether every group that adds to the bucket's gradients has run in the current action."""
        return all(open_bucket.bucket.users[param] <= self._passed_groups for param in open_bucket.full_gradients)

    def _open(self, bucket: Bucket) -> OpenBucket:
        """Opens a bucket with leased memory for its full gradients, whose contents are undefined."""
        if not self.per_step:
            self.finish(max(0, self.max_in_flight - 1))
        params = [param for param in bucket.users if param.trainable]
        lease = ExitStack()
        gradients = dict(zip(params, self._lease([padded_shape(param) for param in params], lease), strict=True))
        self.counters.change("full_gradients", len(gradients))
        lease.callback(self.counters.change, "full_gradients", -len(gradients))
        for param, gradient in gradients.items():
            if len(gradient) > param.shape[0]:
                gradient[param.shape[0] :].zero_()
        open_bucket = self._open_buckets[bucket] = OpenBucket(bucket, gradients, lease)
        return open_bucket

    def _start_reduction(self, open_bucket: OpenBucket) -> None:
        """Starts the reduction of a bucket, with zeros for the gradients that this rank has not written."""
        del self._open_buckets[open_bucket.bucket]
        if self.per_step:
            self.finish(max(0, self.max_in_flight - 1))
        for param in open_bucket.full_gradients.keys() - open_bucket.written_params:
            open_bucket.full_gradients[param].zero_()  # another rank may have written it, if the forward depends on the data
        # Ranks of `wp` start reductions in the order of backwards, since they run the same actions on the same layers. If the
        # data decides which modules run, and a bucket is smaller than a layer, ranks compare a checksum of names.
        microbatches = self.store.reduction.concurrent_microbatches(self.group)
        reduction = (
            self._start_reduce_scatter(open_bucket)
            if microbatches is None
            else self._start_all_to_all(open_bucket, microbatches)
        )
        self._reductions.append(reduction)
        self.counters.add("reductions", 1)
        for gradient in open_bucket.full_gradients.values():
            self.counters.add("reduced_bytes", gradient.nbytes * (self.group.size - 1) // self.group.size)
            self.counters.sent.add(gradient, self.group, passes=1)
        self.finish(self.max_in_flight)

    def _start_reduce_scatter(self, open_bucket: OpenBucket) -> Reduction:
        gradients, bucket, coord = open_bucket.full_gradients, open_bucket.bucket, self.group.coord
        transport = self.group.transport("reduce")
        scratch_shapes = [(transport.num_scratch_rows(param.row_shard.size), *param.shape[1:]) for param in gradients]
        scratch = self._lease(scratch_shapes, open_bucket.lease)
        label, contents = f"the gradients of {bucket.group.name}", checksum(param.name for param in gradients)
        handle = transport.reduce_scatter(list(gradients.values()), scratch, label=label, contents=contents)
        rows = {param: gradient.chunk(self.group.size)[coord] for param, gradient in gradients.items()}
        return Reduction(bucket, [handle], rows, open_bucket.lease)

    def _start_all_to_all(self, open_bucket: OpenBucket, microbatches: range) -> Reduction:
        """Starts to receive this rank's rows of every rank's gradients, which the store sums in a fixed order."""
        transport, gradients = self.group.transport("reduce"), open_bucket.full_gradients
        shapes = [(self.group.size, param.row_shard.size, *param.shape[1:]) for param in gradients]
        rows = dict(zip(gradients, self._lease(shapes, open_bucket.lease), strict=True))
        handles = [
            transport.all_to_all(rows[param], gradient.view(rows[param].shape), label=f"the gradient of {param.name}")
            for param, gradient in gradients.items()
        ]
        return Reduction(open_bucket.bucket, handles, rows, open_bucket.lease, microbatches)

    def _lease(self, shapes: Sequence[tuple[int, ...]], lease: ExitStack) -> list[Tensor]:
        """Leases one buffer of the store's dtype until `lease` closes, and returns views of these shapes."""
        dtype, device = self.store.dtype, self.store.device
        layout = FlatLayout(shapes, ALIGNMENT_BYTES // dtype.itemsize)
        if not layout.numel:
            return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
        flat = lease.enter_context(self.pool.lease((layout.numel,), dtype, device))
        self.counters.change("full_gradient_bytes", flat.nbytes)
        lease.callback(self.counters.change, "full_gradient_bytes", -flat.nbytes)
        return layout.views(flat)

    def _release(self, reduction: Reduction) -> None:
        """Waits until peers have received this rank's data, and returns the buffer to the pool."""
        for handle in reduction.handles:
            handle.wait_sent()
        reduction.lease.close()

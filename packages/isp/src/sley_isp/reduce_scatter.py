"""Reduce-scatter of weight gradients, from full size to shards: buckets that are being filled, and those in flight.

lease ──> products written ──> sent and received ──> own rows summed ──> store.add ──> lease back
            `add`                in the background     `advance`, when all is here     `finish`, when the bound or
                                                                                       the end of a pass asks

A bucket has the gradients of one parameter group. Once per micro-batch it leaves when the backward has moved on to another
group. Once per step it stays, at full size, until the last action that can add to it: fewer exchanges, for the memory of all
full-size gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sley_core.api.comm import checksum
from sley_core.api.parts import ALIGNMENT_BYTES, offsets, views_of
from sley_isp.param_group import padded_shape, shard_of, without_padding

if TYPE_CHECKING:
    from sley_core.api.comm import Group, Work
    from sley_core.api.parts import GradientStore, Param
    from sley_core.protocols import MemoryPool
    from sley_isp.communicator import Counters
    from sley_isp.param_group import ParamGroup

Write = Callable[[Tensor, bool], None]
"""Writes a gradient into a tensor of the store's dtype, or adds it if the flag is set."""


@dataclass(eq=False)
class Bucket:
    """Names parameters whose gradients are reduced in one exchange.

    number: counts buckets in the order of their layers. group: of the parameters. chunks: those of all of its parameters, if it
    is reduced once per step. users: by parameter, the groups whose backward adds to it.
    """

    number: int
    group: ParamGroup
    chunks: frozenset[int]
    users: dict[Param, set[ParamGroup]] = field(default_factory=dict)


@dataclass(eq=False)
class Filling:
    """A bucket being filled. full: full gradients, padded. written: parameters whose memory holds a gradient already."""

    bucket: Bucket
    full: dict[Param, Tensor]
    lease: ExitStack
    written: set[Param] = field(default_factory=set)


@dataclass(eq=False)
class InFlight:
    """A bucket in flight. rows: this rank's rows of each full gradient, which hold the sum once `works` are done; if the
    order of sums is fixed, those of each rank, [size, ...], for the micro-batches `micros`.
    """

    bucket: Bucket
    works: list[Work]
    rows: dict[Param, Tensor]
    lease: ExitStack
    micros: range | None = None


class GradientReducer:
    """Reduces full-size gradients over `group` and adds this rank's rows to `store`, with at most `bound` buckets in flight.

    bound: 0 waits for each at once. once: buckets wait for the last action of the step that can add to them; `bound` then
    limits those that were sent. A parameter of several groups is then in the bucket of the first one, and else in one of each.
    """

    def __init__(
        self, bound: int, store: GradientStore, pool: MemoryPool, group: Group, counters: Counters, *, once: bool
    ) -> None:
        self.bound = bound
        self.once = once
        self.store = store
        self.pool = pool
        self.group = group
        self.counters = counters
        self._homes: dict[Param, ParamGroup] = {}
        self._buckets: dict[tuple[ParamGroup, frozenset[int]], Bucket] = {}
        self._filling: dict[Bucket, Filling] = {}
        self._in_flight: deque[InFlight] = deque()
        self._current: ParamGroup | None = None
        self._passed: set[ParamGroup] = set()

    def register(self, group: ParamGroup, params: Sequence[Param]) -> None:
        """Assigns `params` of `group` to buckets; called for all modules before the first `add`."""
        for param in params:
            home = self._homes.setdefault(param, group) if self.once else group
            key = home, param.chunks if self.once else frozenset()
            bucket = self._buckets.setdefault(key, Bucket(len(self._buckets), home, param.chunks))
            bucket.users.setdefault(param, set()).add(group)

    def add(self, group: ParamGroup, param: Param, write: Write) -> None:
        """Adds a contribution to the gradient of `param`, from a backward of `group`; may start or finish earlier reductions.

        write: writes or adds it into a full-size tensor. All ranks must go from group to group in the same order; which modules
        of a group contribute may depend on the data, and so says nothing about when a bucket is complete.
        """
        self.advance()
        if group is not self._current:
            # By the group, not the bucket: a weight tied to another layer's is in that layer's bucket, and how often a backward
            # alternates between the two may depend on its data.
            if self._current is not None:
                self._passed.add(self._current)
            self._current = group
            for filling in self._in_order():
                if not self.once or (self._is_last(filling.bucket) and self._is_complete(filling)):
                    self._start(filling)
        bucket = self._buckets[(self._homes[param], param.chunks) if self.once else (group, frozenset())]
        filling = self._filling.get(bucket) or self._open(bucket)
        write(without_padding(filling.full[param], param), param in filling.written)
        filling.written.add(param)

    def flush(self, *, everything: bool = False) -> None:
        """Starts the reduction of every bucket to which no later action can add; called at the end of an action.

        everything: of all buckets; used outside of a step, where no contribution is known to be the last.
        """
        for filling in self._in_order():
            if everything or not self.once or self._is_last(filling.bucket):
                self._start(filling)
        self._current = None
        self._passed.clear()

    def advance(self) -> None:
        """Sums the reductions that have arrived, oldest first. Never blocks.

        So a faster peer need not wait for this rank. The result is added to the store only in `finish`, at the same point on
        all ranks, because the store may then start other collectives.
        """
        for reduction in self._in_flight:
            are_done = [work.test() for work in reduction.works]  # each of them, so that each is moved on
            if all(are_done):
                for work in reduction.works:
                    work.wait()

    def finish(self, at_most: int = 0) -> None:
        """Waits for the oldest reductions until `at_most` are in flight, and adds each result to the store."""
        while len(self._in_flight) > at_most:
            reduction = self._in_flight.popleft()
            for work in reduction.works:
                work.wait()  # if this fails, a peer may still read the buffer, so it is not returned to the pool
            try:
                for param, rows in reduction.rows.items():
                    if reduction.micros is None:
                        self.store.add(param, rows)
                    else:
                        by_micro = dict(zip(reduction.micros, rows, strict=True))
                        self.store.add_of_micros(param, by_micro, reduction.bucket.group.layer)
            finally:
                self._end(reduction)

    def discard(self) -> None:
        """Waits for all reductions and discards the results, after a failed step."""
        for filling in self._filling.values():
            filling.lease.close()
        self._filling.clear()
        self._current = None
        self._passed.clear()
        while self._in_flight:
            self._end(self._in_flight.popleft())

    def _in_order(self) -> list[Filling]:
        """Returns the buckets being filled, those of later layers first: which came first may depend on the data."""
        return sorted(self._filling.values(), key=lambda filling: -filling.bucket.number)

    def _is_last(self, bucket: Bucket) -> bool:
        """Returns whether no later action of this list can add to `bucket`."""
        return self.store.state.last_of_list(bucket.chunks)

    def _is_complete(self, filling: Filling) -> bool:
        """Returns whether the current action has passed every group that adds to a trained parameter of the bucket."""
        return all(filling.bucket.users[param] <= self._passed for param in filling.full)

    def _open(self, bucket: Bucket) -> Filling:
        """Leases full-size memory for a bucket; first waits for older ones if the bound asks for it. Contents are undefined."""
        if not self.once:
            self.finish(max(0, self.bound - 1))
        params = [param for param in bucket.users if param.trainable]
        lease = ExitStack()
        full = dict(zip(params, self._lease([padded_shape(param) for param in params], lease), strict=True))
        self.counters.hold("full_gradients", len(full))
        lease.callback(self.counters.hold, "full_gradients", -len(full))
        for param, tensor in full.items():
            if len(tensor) > param.shape[0]:
                tensor[param.shape[0] :].zero_()
        filling = self._filling[bucket] = Filling(bucket, full, lease)
        return filling

    def _start(self, filling: Filling) -> None:
        """Starts the reduction of a bucket; all its parameters are sent on every rank, with zeros for those not written."""
        del self._filling[filling.bucket]
        if self.once:
            self.finish(max(0, self.bound - 1))
        for param in filling.full.keys() - filling.written:
            filling.full[param].zero_()  # another rank may have used it, in a forward that depends on its data
        # In the order of backwards, the same on all ranks of `wp`: they run the same actions on the same layers. If the data
        # decides which modules run, and a bucket is less than a layer, ranks detect it by the checksum of names.
        micros = self.store.reduction.micros_beside(self.group)
        reduction = self._start_reduce_scatter(filling) if micros is None else self._start_all_to_all(filling, micros)
        self._in_flight.append(reduction)
        self.counters.add("reductions", 1)
        for tensor in filling.full.values():
            self.counters.add("reduced_bytes", tensor.nbytes * (self.group.size - 1) // self.group.size)
            self.counters.sent.add(tensor, self.group, passes=1)
        self.finish(self.bound)

    def _start_reduce_scatter(self, filling: Filling) -> InFlight:
        full, bucket, coord = filling.full, filling.bucket, self.group.coord
        transport = self.group.transport("reduce")
        scratch = [(transport.num_scratch_rows(shard_of(param).size), *param.shape[1:]) for param in full]
        received = self._lease(scratch, filling.lease)
        what, contents = f"the gradients of {bucket.group.name}", checksum(param.name for param in full)
        work = transport.reduce_scatter(list(full.values()), received, what=what, contents=contents)
        rows = {param: tensor.chunk(self.group.size)[coord] for param, tensor in full.items()}
        return InFlight(bucket, [work], rows, filling.lease)

    def _start_all_to_all(self, filling: Filling, micros: range) -> InFlight:
        """Exchanges rows in place of their sums, whose order is fixed: each rank gets its rows of every rank's gradient, of
        `micros`.
        """
        transport = self.group.transport("reduce")
        shapes = [(self.group.size, shard_of(param).size, *param.shape[1:]) for param in filling.full]
        rows = dict(zip(filling.full, self._lease(shapes, filling.lease), strict=True))
        works = [
            transport.all_to_all(rows[param], tensor.view(rows[param].shape), what=f"the gradient of {param.name}")
            for param, tensor in filling.full.items()
        ]
        return InFlight(filling.bucket, works, rows, filling.lease, micros)

    def _lease(self, shapes: Sequence[tuple[int, ...]], lease: ExitStack) -> list[Tensor]:
        """Leases one buffer of the pool until `lease` closes; returns views of these shapes, of the store's dtype."""
        dtype, device = self.store.dtype, self.store.device
        starts, numel = offsets(shapes, ALIGNMENT_BYTES // dtype.itemsize)
        if not numel:
            return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
        flat = lease.enter_context(self.pool.lease((numel,), dtype, device))
        self.counters.hold("full_gradient_bytes", flat.nbytes)
        lease.callback(self.counters.hold, "full_gradient_bytes", -flat.nbytes)
        return views_of(flat, starts, shapes)

    def _end(self, reduction: InFlight) -> None:
        """Waits until the peers have received this rank's data, then returns the buffer to the pool."""
        for work in reduction.works:
            work.wait_sent()
        reduction.lease.close()

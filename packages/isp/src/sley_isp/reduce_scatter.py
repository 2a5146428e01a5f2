"""Reduce-scatter of weight gradients, from full tensors to shards.

lease ──> products written ──> sent and received ──> local rows summed ──> store.add ──> lease ends
          `add`                in the background     `advance`             `finish`, at the limit of reductions in flight
                                                                           or after the last gradients of a chunk

A bucket holds full gradients of parameters of one parameter group. With one reduction per microbatch, it is sent when the
backward continues with another group. With one reduction per step, it is sent once nothing can add to it any more, which saves
exchanges but needs memory for all full gradients.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from sley_core.api.comm import Group, SentBytes, Work, checksum
from sley_core.api.parts import ALIGNMENT_BYTES, FlatLayout, Param, Parts
from sley_isp.param_group import ParamGroup, padded_shape, remove_padding

WriteGradient = Callable[[torch.Tensor, bool], None]
"""A function `(full, accumulate)` that writes a gradient into the tensor `full`, or, if `accumulate`, adds it to `full`."""

MAX_IN_FLIGHT = 2
"""The maximum number of reductions that overlap with the backward, including the reduction that is being written."""


class Counters(SentBytes):
    """Counts the exchanges of one rank in the form that `protocols.Counts` requires. totals: the counts of the running step."""

    def __init__(self) -> None:
        super().__init__()
        self.totals: Counter[str] = Counter()
        self._current: Counter[str] = Counter()
        self._peaks = Counter(unsharded_groups=0, full_gradients=0)
        self._report: dict[str, float] = {}

    def begin_step(self) -> None:
        super().begin_step()
        self.totals = Counter(gathers=0, demand_gathers=0, gathered_bytes=0, reductions=0, reduced_bytes=0)

    def change(self, name: str, difference: int) -> None:
        """Adds `difference` to the current count `name`. `counts` reports the peak of this count as `most_{name}`."""
        self._current[name] += difference
        self._peaks[name] = max(self._peaks[name], self._current[name])

    def end_step(self) -> None:
        super().end_step()
        self._report = {f"{name}_per_step": total for name, total in self.totals.items()} | super().counts()

    def counts(self) -> dict[str, float]:
        """Returns the counts of the last training step and the peaks of all steps and evaluations."""
        return self._report | {f"most_{name}": peak for name, peak in self._peaks.items()}


@dataclass(eq=False)
class Bucket:
    """Describes parameters whose gradients are reduced in one exchange, and holds their gradients until the exchange starts.
    number: the index in layer order. chunks: the model chunks that use the parameters, if gradients are reduced once per step,
    else empty. users: the groups whose backwards add to each parameter's gradient. full_gradients: the gradients with padding
    while the bucket is open. written_params: the parameters whose gradients this rank has written. lease: ends the use of the
    memory.
    """

    number: int
    group: ParamGroup
    chunks: frozenset[int]
    users: dict[Param, set[ParamGroup]] = field(default_factory=dict)
    full_gradients: dict[Param, torch.Tensor] = field(default_factory=dict)
    written_params: set[Param] = field(default_factory=set)
    lease: ExitStack = field(default_factory=ExitStack)


class Reduction(NamedTuple):
    """An exchange of gradients in flight. add_sums: a function that adds the result to the store once `handles` are done. sent:
    a tensor outside the leased memory that must stay alive until peers have received it, or None.
    """

    handles: list[Work]
    add_sums: Callable[[], None]
    lease: ExitStack
    sent: torch.Tensor | None = None


class GradientReducer:
    """Reduces full gradients over `group`, and adds this rank's rows to the store of `parts`. max_in_flight: the maximum number
    of reductions in flight, or 0 to wait for each reduction immediately. A parameter that several groups share is in a bucket
    of each group or, if gradients are reduced once per step, of only the first group.
    """

    def __init__(self, max_in_flight: int, parts: Parts, group: Group, counters: Counters) -> None:
        self.max_in_flight = max_in_flight
        self.store = parts.store
        self.group = group
        self.counters = counters
        self._group_of_param: dict[Param, ParamGroup] = {}
        self._buckets: dict[tuple[ParamGroup, frozenset[int]], Bucket] = {}
        self._open_buckets: set[Bucket] = set()
        self._reductions: deque[Reduction] = deque()
        self._current: ParamGroup | None = None
        self._passed_groups: set[ParamGroup] = set()

    def register(self, group: ParamGroup, params: Collection[Param]) -> None:
        """Assigns `params` of `group` to buckets. Must be called for all modules before the first `add`."""
        for param in params:
            self._group_of_param.setdefault(param, group)
            key = self._bucket_key(group, param)
            bucket = self._buckets.setdefault(key, Bucket(len(self._buckets), key[0], param.chunks))
            bucket.users.setdefault(param, set()).add(group)

    def _bucket_key(self, group: ParamGroup, param: Param) -> tuple[ParamGroup, frozenset[int]]:
        return (self._group_of_param[param], param.chunks) if group.options.reduce == "step" else (group, frozenset())

    def add(self, group: ParamGroup, param: Param, write: WriteGradient) -> None:
        """Adds to the gradient of `param` in a backward of `group`. May start or finish earlier reductions.

        write: writes the contribution into the full gradient, or adds it. All ranks must pass the groups in the same order. A
        bucket counts as complete when the backward has passed its groups, not when all parameters have contributed, since the
        data may decide which modules of a group run.
        """
        self.advance()
        if group is not self._current:
            # Groups are compared, not buckets: a tied weight may be in the bucket of another layer, and the data may decide how
            # often a backward alternates between the buckets of the two layers.
            if self._current is not None:
                self._passed_groups.add(self._current)
            self._current = group
            for bucket in self._ordered_buckets():
                if bucket.group.options.reduce != "step" or self._is_complete(bucket):
                    self._start_reduction(bucket)
        bucket = self._buckets[self._bucket_key(group, param)]
        if bucket not in self._open_buckets:
            self._open(bucket)
        write(remove_padding(bucket.full_gradients[param], param), param in bucket.written_params)
        bucket.written_params.add(param)

    def flush(self, *, all_buckets: bool = False) -> None:
        """Starts the reduction of every open bucket to which no later action of the list can add. Called when an action ends.
        all_buckets: whether to reduce all open buckets in any case, as a backward outside a step needs after each contribution.
        """
        for bucket in self._ordered_buckets():
            if all_buckets or bucket.group.options.reduce != "step" or self.store.state.are_gradients_final(bucket.chunks):
                self._start_reduction(bucket)
        self._current = None
        self._passed_groups.clear()

    def advance(self) -> None:
        """Advances the exchanges whose data have arrived, so that faster peers do not wait for this rank. Never blocks. Only
        `finish` adds sums to the store: the store may then start collectives, which need the same order on all ranks.
        """
        for reduction in self._reductions:
            are_done = [handle.is_completed() for handle in reduction.handles]  # a list, since this advances each handle
            if all(are_done):
                for handle in reduction.handles:
                    handle.wait()

    def finish(self, max_remaining: int = 0) -> None:
        """Waits for the oldest reductions and adds their sums to the store, until at most `max_remaining` are in flight."""
        while len(self._reductions) > max_remaining:
            reduction = self._reductions.popleft()
            for handle in reduction.handles:
                handle.wait()  # if this raises, a peer may still read the buffer, so the lease does not end
            try:
                reduction.add_sums()
            finally:
                self._release(reduction)

    def discard(self) -> None:
        """Discards the gradients and sums of a failed step. Waits until peers have received this rank's data."""
        for bucket in self._open_buckets:
            bucket.lease.close()
        self._open_buckets.clear()
        self._current = None
        self._passed_groups.clear()
        while self._reductions:
            self._release(self._reductions.popleft())

    def _ordered_buckets(self) -> list[Bucket]:
        """Returns the open buckets, later layers first. Ranks may open buckets in different orders."""
        return sorted(self._open_buckets, key=lambda bucket: -bucket.number)

    def _is_complete(self, bucket: Bucket) -> bool:
        """Returns whether the bucket's gradients are final: no later part of this action and no later action adds to them."""
        has_passed = all(bucket.users[param] <= self._passed_groups for param in bucket.full_gradients)
        return has_passed and self.store.state.are_gradients_final(bucket.chunks)

    def _open(self, bucket: Bucket) -> None:
        """Opens a bucket with leased memory for its full gradients, whose contents are undefined."""
        if bucket.group.options.reduce != "step":
            self.finish(max(0, self.max_in_flight - 1))
        params = [param for param in bucket.users if param.trainable]
        lease = ExitStack()
        gradients = dict(zip(params, self._lease(bucket.group, [padded_shape(param) for param in params], lease), strict=True))
        self.counters.change("full_gradients", len(gradients))
        lease.callback(self.counters.change, "full_gradients", -len(gradients))
        for param, gradient in gradients.items():
            if len(gradient) > param.shape[0]:
                gradient[param.shape[0] :].zero_()
        bucket.full_gradients, bucket.lease = gradients, lease
        bucket.written_params.clear()
        self._open_buckets.add(bucket)

    def _start_reduction(self, bucket: Bucket) -> None:
        """Starts the reduction of a bucket, with zeros for the gradients that this rank has not written."""
        self._open_buckets.remove(bucket)
        if bucket.group.options.reduce == "step":
            self.finish(max(0, self.max_in_flight - 1))
        for param in bucket.full_gradients.keys() - bucket.written_params:
            bucket.full_gradients[param].zero_()  # another rank may have written it, if the forward depends on the data
        # Ranks of `wp` start reductions in the order of backwards, since they run the same actions on the same layers. If the
        # data decides which modules run, and a bucket is smaller than a layer, ranks compare a checksum of names.
        microbatches = self.store.reduction.concurrent_microbatches(self.group)
        reduction = self._start_reduce_scatter(bucket) if microbatches is None else self._start_all_to_all(bucket, microbatches)
        self.counters.totals["reductions"] += 1
        for gradient in bucket.full_gradients.values():
            self.counters.totals["reduced_bytes"] += gradient.nbytes * (self.group.size - 1) // self.group.size
            self.counters.add(gradient, self.group, passes=1)
        bucket.full_gradients = {}
        self.enqueue(reduction)

    def enqueue(self, reduction: Reduction) -> None:
        """Adds `reduction`, which has started, to the reductions in flight. Finishes the oldest reductions beyond the limit."""
        self._reductions.append(reduction)
        self.finish(self.max_in_flight)

    def _start_reduce_scatter(self, bucket: Bucket) -> Reduction:
        """Starts one reduce-scatter of all gradients in `bucket`, and returns it."""
        gradients, group = bucket.full_gradients, bucket.group
        transport = self.group.transport("reduce")
        scratch_shapes = [(transport.num_scratch_rows(param.row_shard.size), *param.shape[1:]) for param in gradients]
        scratch = self._lease(group, scratch_shapes, bucket.lease)
        label, names_checksum = f"the gradients of {group.name}", checksum(param.name for param in gradients)
        handle = transport.reduce_scatter(list(gradients.values()), scratch, label=label, checksum=names_checksum)

        def add_sums() -> None:
            for param, gradient in gradients.items():
                self.store.add(param, gradient.chunk(self.group.size)[self.group.coord])

        return Reduction([handle], add_sums, bucket.lease)

    def _start_all_to_all(self, bucket: Bucket, microbatches: range) -> Reduction:
        """Starts an all-to-all of the gradients, whose parts for this rank the store sums in a fixed order. microbatches: the
        numbers of the microbatches that the ranks have run, in rank order.
        """
        transport, gradients, group = self.group.transport("reduce"), bucket.full_gradients, bucket.group
        shapes = [(self.group.size, param.row_shard.size, *param.shape[1:]) for param in gradients]
        rows = dict(zip(gradients, self._lease(group, shapes, bucket.lease), strict=True))
        handles = [
            transport.all_to_all(rows[param], gradient.view(rows[param].shape), label=f"the gradient of {param.name}")
            for param, gradient in gradients.items()
        ]

        def add_sums() -> None:
            for param in rows:
                self.store.add_microbatches(param, dict(zip(microbatches, rows[param], strict=True)), group.layer)

        return Reduction(handles, add_sums, bucket.lease)

    def _lease(self, group: ParamGroup, shapes: Sequence[tuple[int, ...]], lease: ExitStack) -> list[torch.Tensor]:
        """Leases a buffer of the store's dtype from the pool of `group` until `lease` closes. Returns a view per shape."""
        dtype, device = self.store.dtype, self.store.device
        layout = FlatLayout(shapes, ALIGNMENT_BYTES // dtype.itemsize)
        if not layout.numel:
            return [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
        flat = lease.enter_context(group.pool.lease((layout.numel,), dtype, device))
        return layout.views(flat)

    def _release(self, reduction: Reduction) -> None:
        """Waits until peers have received this rank's data, and returns the leased memory to the pool."""
        for handle in reduction.handles:
            handle.wait_sent()
        reduction.lease.close()

"""Sums buckets of gradients over their reduce group.

    AllReduceSums   all-reduce in place
    Bf16Sums        all-to-all of bf16 slices ──added in fp32──> bf16 ──> all-gather of the sums
    ShardSums       reduce-scatter over the ranks that share a copy ──> all-reduce over the ranks that hold the same shard

A copy is one copy of the optimizer states; each of the ranks that share it holds a shard.

An all-reduce of bf16 tensors in gloo or NCCL adds in bf16, so every addition rounds, and a sum of equal terms stops growing
after 256 terms. `Bf16Sums` sends as many bytes, but rounds each term once and the sum once, for any number of ranks. All ranks
get the same bits.
"""

from collections import deque
from collections.abc import Callable, Mapping

import torch

from sley_core.api.comm import Group, SentBytes, Transport, Work
from sley_core.api.parts import GradientBuffer, Sums, round_up
from sley_dp.plugin import SUMS_CHANNEL, copies_axis

MAX_ACTIVE = 2
"""The maximum number of sums in flight that need scratch memory: one is gathered while the next is exchanged."""


class AllReduceSums(Sums):
    """All-reduces buffers in place, in the gradients' dtype."""

    def __init__(self, sent: SentBytes) -> None:
        self.sent = sent
        self._handles: list[Work] = []

    def start(self, buffer: GradientBuffer, group: Group) -> None:
        """Starts the all-reduce of `buffer`, and advances the all-reduces in flight."""
        # All ranks of the bucket's reduce group start their buckets in the same order.
        self._handles.append(group.transport().all_reduce(buffer.data, label=describe_bucket(buffer), checksum=buffer.checksum))
        self.sent.add(buffer.data, group, passes=2)
        for handle in self._handles:
            handle.is_completed()  # advances the sum

    def finish(self) -> None:
        for handle in self._handles:
            handle.wait()
        # This follows the waits for all sums, so that a slow peer does not delay them.
        for handle in self._handles:
            handle.wait_sent()
        self._handles.clear()

    def discard(self) -> None:
        self.finish()  # a collective that has started cannot be cancelled


class Bf16Sums(Sums):
    """Sums gradients in at least fp32, but sends them in bf16. All ranks of a group must start and finish its sums in the same
    order.
    """

    def __init__(self, sent: SentBytes) -> None:
        self.sent = sent
        self._sums: deque[_Bf16Sum] = deque()

    def start(self, buffer: GradientBuffer, group: Group) -> None:
        """Starts the exchange of `buffer` in bf16. If MAX_ACTIVE sums are in flight, first waits for the oldest."""
        if len(self._sums) == MAX_ACTIVE:
            self._sums.popleft().finish()
        for earlier_sum in self._sums:
            earlier_sum.gather()
        self._sums.append(_Bf16Sum(buffer, group))
        self.sent.add(self._sums[-1].send_row, group, passes=2)  # an all-to-all and an all-gather

    def finish(self) -> None:
        for bucket_sum in self._sums:
            bucket_sum.gather()
        while self._sums:
            self._sums.popleft().finish()

    def discard(self) -> None:
        while self._sums:
            self._sums.popleft().work.wait()


class _Bf16Sum:
    """The sum of one bucket. The constructor starts the exchange; calls of `gather` and then `finish` complete the sum."""

    def __init__(self, buffer: GradientBuffer, group: Group) -> None:
        self.buffer = buffer
        self.group = group
        num_columns = round_up(buffer.data.numel(), group.size)
        self.send_row, self.receive_row = buffer.data.new_zeros((2, num_columns), dtype=torch.bfloat16)
        self.send_row[: buffer.data.numel()].copy_(buffer.data)
        self._has_gathered = False
        # All ranks of the bucket's reduce group start their buckets in the same order.
        self.work: Work = group.all_to_all(self.receive_row, self.send_row, label=describe_bucket(buffer))

    def gather(self) -> None:
        """In its first call, waits for the exchange, sums this rank's slice in at least fp32, and starts the all-gather."""
        if self._has_gathered:
            return
        self._has_gathered = True
        self.work.wait()
        dtype = torch.promote_types(self.buffer.data.dtype, torch.float32)
        local_slice = self.receive_row.view(self.group.size, -1).sum(0, dtype=dtype).bfloat16()  # [columns / ranks]
        # All ranks of the group call this at the same point: before they start the same later bucket, or after the last start.
        self.work = self.group.all_gather(self.send_row, local_slice, label=describe_bucket(self.buffer))

    def finish(self) -> None:
        """Waits for the all-gather and writes the sum into the buffer."""
        self.work.wait()
        self.buffer.data.copy_(self.send_row[: self.buffer.data.numel()])


class ShardSums(Sums):
    """Sums each buffer over its reduce group, into this rank's shard of the buffer.

    is_async: whether device work runs asynchronously to the host. If so, the all-reduces over the ranks that hold the same
    shard start only in `finish`, or earlier if scratch memory must be reused, and not as soon as a reduce-scatter is complete.
    """

    def __init__(self, groups: Mapping[str, Group], *, is_async: bool) -> None:
        self._groups = groups
        self._is_async = is_async
        self._sums: list[_ShardSum] = []
        self._scratch_users: list[tuple[torch.Tensor, _ShardSum]] = []

    def start(self, buffer: GradientBuffer, group: Group) -> None:
        """Starts to sum `buffer` over `group`, the ranks that share a copy of the optimizer states. Afterwards, only this
        rank's shard of the buffer is defined.
        """
        transport = group.transport(SUMS_CHANNEL)
        copies_group = self._groups.get(copies_axis(buffer.reduce_group))
        scratch = self._acquire_scratch(buffer, transport.num_scratch_rows(buffer.local_part.numel()))
        # This runs on a separate channel. All ranks that share a copy start their buckets in the same order.
        scatter = transport.reduce_scatter([buffer.data], [scratch], label=describe_bucket(buffer), checksum=buffer.checksum)
        self._sums.append(_ShardSum(buffer, scatter, copies_group.transport if copies_group else None))
        if scratch.numel():
            self._scratch_users.append((scratch, self._sums[-1]))
        if not self._is_async:
            # `all` stops at the first sum with an incomplete reduce-scatter, so that all ranks use the same order.
            all(bucket_sum.advance() for bucket_sum in self._sums)

    def finish(self) -> None:
        """Blocks until this rank's shard of each buffer holds the sum, with zeros in its padding."""
        for bucket_sum in self._sums:
            bucket_sum.reduce_copies()
        for bucket_sum in self._sums:
            bucket_sum.wait()
        # This follows the waits for all sums, so that a slow peer does not delay them.
        for bucket_sum in self._sums:
            bucket_sum.wait_sent()
        self._sums.clear()
        self._scratch_users.clear()

    def discard(self) -> None:
        self.finish()  # a collective that has started cannot be cancelled

    def _acquire_scratch(self, buffer: GradientBuffer, numel: int) -> torch.Tensor:
        """Returns `numel` elements of scratch memory for peers' data. If MAX_ACTIVE sums use scratch memory, waits for the
        oldest sum and reuses its memory if that is large enough.
        """
        if numel and len(self._scratch_users) == MAX_ACTIVE:
            scratch, oldest_sum = self._scratch_users.pop(0)
            for bucket_sum in self._sums[: self._sums.index(oldest_sum) + 1]:
                bucket_sum.reduce_copies()
            oldest_sum.scatter.wait_sent()
            if scratch.numel() >= numel:
                return scratch[:numel]
        return torch.empty(numel, dtype=buffer.data.dtype, device=buffer.data.device)


class _ShardSum:
    """The sum of one bucket: a reduce-scatter, and an all-reduce by `copies_transport` if several ranks hold the same shard."""

    def __init__(self, buffer: GradientBuffer, scatter: Work, copies_transport: Callable[[], Transport] | None) -> None:
        self.buffer = buffer
        self.scatter = scatter
        self._copies_transport = copies_transport
        self._reduction: Work | None = None
        self._has_scattered = False

    def advance(self) -> bool:
        """Advances this sum without waiting. Returns whether its reduce-scatter is complete."""
        if not self._has_scattered and self.scatter.is_completed():
            self.reduce_copies()
        if self._reduction is not None:
            self._reduction.is_completed()
        return self._has_scattered

    def reduce_copies(self) -> None:
        """Waits for the reduce-scatter and, if several ranks hold the same shard, starts the all-reduce over these ranks."""
        if self._has_scattered:
            return
        self._has_scattered = True
        self.scatter.wait()
        if self._copies_transport is not None:
            shard, checksum = self.buffer.local_part, self.buffer.checksum
            # The ranks that hold the same shard call this in the order in which the buckets were started.
            self._reduction = self._copies_transport().all_reduce(shard, label=describe_bucket(self.buffer), checksum=checksum)

    def wait(self) -> None:
        """Blocks until this rank's shard holds the sum, with zeros in its padding."""
        if self._reduction is not None:
            self._reduction.wait()
        self.buffer.zero_padding()

    def wait_sent(self) -> None:
        """Blocks until peers no longer read this rank's data."""
        self.scatter.wait_sent()
        if self._reduction is not None:
            self._reduction.wait_sent()


def describe_bucket(buffer: GradientBuffer) -> str:
    """Returns the name of a bucket for error messages of collectives."""
    return f"the bucket of {buffer.params[0].name}"

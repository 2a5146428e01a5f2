"""Defines transports, which gather and reduce shards of rows, exchange rows, and sum tensors.

    all_gather   rank 0: a0      a0 a1    reduce_scatter   rank 0: a0 a1   a0 + b0    all_to_all   rank 0: a0 a1   a0 b0
                 rank 1:    a1   a0 a1                     rank 1: b0 b1   a1 + b1                 rank 1: b0 b1   a1 b1

    MessageTransport     gloo, on the CPU    every rank sends to every other
    CollectiveTransport  NCCL; gloo on CUDA  the backend's own collectives
    CmaTransport         CPUs of one host    ranks read each other's memory (cross-memory attach)
    SingleRankTransport  a group of one      the identity

A group has one transport per channel, chosen when groups are made. All ranks call it in the same order, with the same number of
tensors, equal shapes, and an equal `label`, which describes the content. `MessageTransport` and CMA send a `Mark` first, so
different exchanges raise an error on both sides. `CollectiveTransport` logs its exchanges, and ranks compare the logs before a
step ends (`ExchangeLog`). All-reduces of gloo and NCCL are neither marked nor logged.

With `MessageTransport` and CMA, the rank that owns a shard sums it: its own part first, then the other parts by ascending
coordinate. The result depends neither on timing nor on the transport.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.metadata import entry_points
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from sley_core.comm.exchanges import HEADER_BYTES, ExchangeLog, Mark, Members, Turn, begin_turn, mark_from_header, run_guarded
from sley_core.errors import PluginError, RunError
from sley_core.records import TransportRecord, import_object


class Work:
    """The handle of an exchange that has started. An object of this base class represents a completed exchange.

        start ──> is_completed* ──> wait ──> release ──> wait_sent

    A call may be left out or repeated: each call also does the work of the earlier calls. All methods except `is_completed`
    raise RunError: `collective-failed` after a timeout or if a peer died, with the operation, the group and the content in its
    message, and `ranks-differ` if a peer's exchange differs.
    """

    def is_completed(self) -> bool:
        """Returns whether `wait` would certainly return at once. Does not block, but may advance the exchange."""
        return True

    def wait(self) -> None:
        """Waits until the result is complete. With NCCL, later work on the current stream waits, but the host does not."""

    def release(self) -> None:
        """Discards the result: nothing writes into its memory any more. Waits for the exchange unless it can be abandoned."""
        self.wait()

    def wait_sent(self) -> None:
        """Waits until the peers have received this rank's inputs. Afterwards, the caller may write inputs and outputs."""


@dataclass(eq=False)
class GroupWork(Work):
    """The handle of an exchange that consists of works of a process group. A simulated exchange has no works. _turn: the
    exchange, for errors; None only if there are no works. _stages: pairs of works and a function; for each pair in turn, `wait`
    waits for the works and then calls the function, if any. _sends: the works for which only `wait_sent` waits. A list loses
    each work whose wait has ended. _error: the error that torch has raised in a wait. _failure: the error that waits raise.
    """

    _turn: Turn | None
    _stages: list[tuple[list[Any], Callable[[], object] | None]]
    _sends: list[Any] = field(default_factory=list)
    _error: RuntimeError | None = None
    _failure: RunError | None = None

    def is_completed(self) -> bool:
        return all(work.is_completed() for works, _ in self._stages for work in works)

    def wait(self) -> None:
        while self._stages:
            self._wait_for(*self._stages[0])
            del self._stages[0]

    def wait_sent(self) -> None:
        self.wait()
        self._wait_for(self._sends)

    def _wait_for(self, works: list[Any], finish: Callable[[], object] | None = None) -> None:
        """Waits for each of `works` in turn, and calls `finish`. Raises RunError `collective-failed` if a work fails, or the
        RunError of `finish`, and raises it again at each later wait. After KeyboardInterrupt, a later wait goes on.
        """
        if self._failure is not None:
            raise self._failure
        try:
            while works:
                assert self._turn is not None
                run_guarded(partial(self._wait_for_first, works), self._turn)
            if finish is not None:
                finish()
        except RunError as error:
            self._failure = error
            raise

    def _wait_for_first(self, works: list[Any]) -> None:
        """Waits for the first of `works`, and removes it unless it fails, since a second wait for a gloo message would block. A
        signal interrupts torch's wait only as it returns. It cannot replace an error of torch before this method stores it.
        """
        if self._error is not None:
            raise self._error
        try:
            works[0].wait()
        except RuntimeError as error:
            self._error = error
            raise
        finally:
            if self._error is None:
                del works[0]


class Published(Protocol):
    """Gathers published shards (`Transport.publish`) as often as needed. The shards must not change until `wait_sent`."""

    def all_gather(self, tensors: Sequence[Tensor], shards: Sequence[Tensor], *, label: str) -> Work:
        """Starts to gather the ranks' `shards` [n, ...] into `tensors` [size x n, ...], in the order of the group, and returns
        the handle. A shard may be a view of its full tensor. The shards must not be written until `wait_sent` has returned.
        """

    def wait_sent(self) -> None:
        """Ends the publication, and waits until no peer is still gathering. Afterwards, the shards may be written."""


class Transport(Published, Protocol):
    """Exchanges tensors with the other members of a group on one channel. All members make the same calls in the same order.
    All tensors are contiguous. Outputs may be read after `wait` of the returned handle; inputs and outputs may be written after
    its `wait_sent`. label: describes the content in errors. checksum: a value that must be equal on all ranks.
    """

    def publish(self, shards: Sequence[Tensor], *, label: str) -> Published:
        """Publishes `shards`, and returns an object that gathers them. The shards must not change until the object's
        `wait_sent` has returned. By default, each gather is an ordinary exchange. All ranks call this method and `wait_sent` in
        the same order relative to their other exchanges. Only one publication may be open at a time.
        """
        return self

    def wait_sent(self) -> None:
        return

    def num_scratch_rows(self, num_rows: int) -> int:
        """Returns how many rows of scratch memory `reduce_scatter` needs for a shard of `num_rows` rows. By default, none."""
        return 0

    def reduce_scatter(self, tensors: Sequence[Tensor], scratches: Sequence[Tensor], *, label: str, checksum: int = 0) -> Work:
        """Starts to sum `tensors` [size x n, ...] over the group in place. After `wait`, this rank's n rows contain the sum and
        may be written; other rows are undefined. scratches: temporary memory, one tensor [`num_scratch_rows(n)`, ...] for each
        of `tensors`, of the same dtype.
        """

    def all_to_all(self, received: Tensor, sent: Tensor, *, label: str, checksum: int = 0) -> Work:
        """Starts to exchange rows: sends row i of `sent` [size, ...] to member i, and receives row i of `received` from it."""

    def all_reduce(self, tensor: Tensor, *, label: str, checksum: int = 0) -> Work:
        """Starts to sum `tensor` over the group in place. The sum is bitwise equal on all ranks. `checksum` may be ignored."""


def copy_shard(shard: Tensor, target: Tensor) -> None:
    """Copies `shard` into `target`, of equal shape, unless both begin at the same address."""
    if shard.data_ptr() != target.data_ptr():
        target.copy_(shard)


class ChannelTransport(Transport):
    """The base class of transports over a communicator. name, channel: the channel's name, and its communicator."""

    def __init__(self, members: Members, name: str, channel: dist.ProcessGroup) -> None:
        self.members = members
        self._name = name
        self._channel = channel

    def all_reduce(self, tensor: Tensor, *, label: str, checksum: int = 0) -> Work:
        """Starts the backend's own all-reduce, which does not compare `label` and `checksum` between ranks."""
        turn = begin_turn("all-reduce", self.members, label, self._name, tensor.nbytes)
        work = run_guarded(lambda: dist.all_reduce(tensor, group=self._channel, async_op=True), turn)
        return GroupWork(turn, [([work], None)])


class CollectiveTransport(ChannelTransport):
    """Exchanges tensors with the backend's collectives. log: records exchanges; ranks compare their logs before a step ends."""

    is_coalesced: bool
    """Whether one call of the backend exchanges several tensors. False with gloo: its coalesced gather would read device
    addresses on the host, and its coalesced reduce-scatter copies and all-reduces each tensor.
    """

    def __init__(self, members: Members, name: str, channel: dist.ProcessGroup, log: ExchangeLog) -> None:
        super().__init__(members, name, channel)
        self._log = log
        self.is_coalesced = dist.get_backend(channel) != "gloo"

    def all_gather(self, tensors: Sequence[Tensor], shards: Sequence[Tensor], *, label: str) -> Work:
        def start() -> list[Any]:
            if self.is_coalesced:
                return [self._channel.allgather_into_tensor_coalesced(list(tensors), list(shards))]
            rows = [list(tensor.view(self.members.size, *shard.shape)) for tensor, shard in zip(tensors, shards, strict=True)]
            return [dist.all_gather(*pair, group=self._channel, async_op=True) for pair in zip(rows, shards, strict=True)]

        return self._start("all-gather", label, shards, 0, start)

    def reduce_scatter(self, tensors: Sequence[Tensor], scratches: Sequence[Tensor], *, label: str, checksum: int = 0) -> Work:
        """Sums this rank's rows in place. With gloo, sums all rows. NCCL sums in place if the output is at its rank's offset in
        the input (user guide, "In-place Operations"). Megatron-LM reduces several buckets per call in this way
        (megatron/core/distributed/param_and_grad_buffer.py).
        """

        def start() -> list[Any]:
            if not self.is_coalesced:
                return [dist.all_reduce(tensor, group=self._channel, async_op=True) for tensor in tensors]
            own_rows = [tensor.chunk(self.members.size)[self.members.coord] for tensor in tensors]
            return [self._channel.reduce_scatter_tensor_coalesced(own_rows, list(tensors))]

        return self._start("reduce-scatter", label, tensors, checksum, start)

    def all_to_all(self, received: Tensor, sent: Tensor, *, label: str, checksum: int = 0) -> Work:
        def start() -> list[Any]:
            return [dist.all_to_all_single(received, sent, group=self._channel, async_op=True)]

        return self._start("all-to-all", label, [sent], checksum, start)

    def _start(
        self, operation: str, label: str, tensors: Sequence[Tensor], checksum: int, start: Callable[[], list[Any]]
    ) -> Work:
        """Logs the mark of an exchange of `tensors`, and calls `start`, which returns its works. Returns the handle."""
        mark = Mark.from_tensors(operation, label, tensors, checksum)
        self._log.add(self._name, mark)
        turn = begin_turn(operation, self.members, label, self._name, mark.num_bytes)
        return GroupWork(turn, [(run_guarded(start, turn), None)])


_HEADER_TAG = 0
"""The tag of a header. The tag of other messages is the checksum of a mark, which is also 0 with a probability of 2^-31."""


class MessageTransport(ChannelTransport):
    """Exchanges tensors as messages over gloo, except for the all-reduce: gloo's own is faster. Tensors must be on the host.

        header to every peer ──> compare the peers' headers ──> their parts, received straight into the outputs
        parts to every peer  ─────────────────────────────>

    Such a reduce-scatter is two to four times as fast as gloo's own, and does not copy received parts (docs/measurements.md). A
    part's tag is the checksum of its mark, so gloo never matches parts of two different exchanges; if their lengths differed,
    gloo would end the process. Headers have a separate tag, and arrive in the order in which exchanges begin.
    """

    def all_gather(self, tensors: Sequence[Tensor], shards: Sequence[Tensor], *, label: str) -> Work:
        rows = [tensor.view(self.members.size, *shard.shape) for tensor, shard in zip(tensors, shards, strict=True)]
        places = [[row[peer] for peer in self.members.peers] for row in rows]
        parts = [[shard] * len(self.members.peers) for shard in shards]
        started = self._start_messages(places, parts, Mark.from_tensors("all-gather", label, shards), "all-gather")
        for row, shard in zip(rows, shards, strict=True):
            copy_shard(shard, row[self.members.coord])
        return started

    def num_scratch_rows(self, num_rows: int) -> int:
        """Returns the number of scratch rows for the parts of all peers: `num_rows` per peer."""
        return num_rows * len(self.members.peers)

    def reduce_scatter(self, tensors: Sequence[Tensor], scratches: Sequence[Tensor], *, label: str, checksum: int = 0) -> Work:
        size = self.members.size
        rows = [tensor.view(size, tensor.shape[0] // size, *tensor.shape[1:]) for tensor in tensors]
        own_rows = [buffer[self.members.coord] for buffer in rows]
        arriving = [buffer.view(size - 1, *part.shape[1:]) for buffer, part in zip(scratches, rows, strict=True)]

        def finish() -> None:
            for total, received in zip(own_rows, arriving, strict=True):
                for part in received:
                    total.add_(part)

        parts = [[buffer[peer] for peer in self.members.peers] for buffer in rows]
        mark = Mark.from_tensors("reduce-scatter", label, tensors, checksum)
        return self._start_messages([list(buffer) for buffer in arriving], parts, mark, "reduce-scatter", finish)

    def all_to_all(self, received: Tensor, sent: Tensor, *, label: str, checksum: int = 0) -> Work:
        places, parts = ([[tensor[peer] for peer in self.members.peers]] for tensor in (received, sent))
        started = self._start_messages(places, parts, Mark.from_tensors("all-to-all", label, [sent], checksum), "all-to-all")
        received[self.members.coord].copy_(sent[self.members.coord])
        return started

    def _start_messages(
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Sequence[Tensor]],
        mark: Mark,
        operation: str,
        finish: Callable[[], None] | None = None,
    ) -> Work:
        """Starts an exchange with every peer, and returns its handle. The i-th tensor of each row of `inputs` goes to the i-th
        peer, and the i-th tensor of each row of `outputs` comes from the i-th peer. All tensors are contiguous and on the host.
        Until `wait_sent`, inputs must not be written. All members call this in the same order. mark: the mark that peers
        compare. operation: the name of the exchange in errors. finish: called after the last receive.
        """
        members, channel = self.members, self._channel
        header, headers = mark.header(), torch.empty(len(members.peers), HEADER_BYTES, dtype=torch.uint8)
        header_receives: list[Any] = []
        receives: list[Any] = []
        sends: list[Any] = []

        def start() -> None:
            for row, peer in zip(headers, members.peers, strict=True):
                header_receives.append(channel.recv([row], peer, _HEADER_TAG))
                sends.append(channel.send([header], peer, _HEADER_TAG))
            for output_row, input_row in zip(outputs, inputs, strict=True):
                for output, peer in zip(output_row, members.peers, strict=True):
                    receives.append(channel.recv([output], peer, mark.checksum))
                for input_part, peer in zip(input_row, members.peers, strict=True):
                    sends.append(channel.send([input_part], peer, mark.checksum))

        def compare_headers() -> None:
            for row, peer in zip(headers, members.peers, strict=True):
                peer_mark = mark_from_header(row)
                if peer_mark[1:] != mark[1:]:
                    members.progress.begin_wait(turn)
                    members.progress.fail_wait("differs", members.ranks[peer])
                    raise mark.mismatch_error(members.rank, peer_mark.label, members.ranks[peer])

        turn = begin_turn(operation, members, mark.label, self._name, mark.num_bytes)
        run_guarded(start, turn)
        return GroupWork(turn, [(header_receives, compare_headers), (receives, finish)], sends)


class SingleRankTransport(Transport):
    """The transport of a group of one rank. It copies inputs to outputs, and leaves tensors that are summed unchanged."""

    def all_gather(self, tensors: Sequence[Tensor], shards: Sequence[Tensor], *, label: str) -> Work:
        for tensor, shard in zip(tensors, shards, strict=True):
            copy_shard(shard, tensor)
        return Work()

    def reduce_scatter(self, tensors: Sequence[Tensor], scratches: Sequence[Tensor], *, label: str, checksum: int = 0) -> Work:
        return Work()

    def all_to_all(self, received: Tensor, sent: Tensor, *, label: str, checksum: int = 0) -> Work:
        received.copy_(sent)
        return Work()

    def all_reduce(self, tensor: Tensor, *, label: str, checksum: int = 0) -> Work:
        return Work()


def uses_messages(backend: str, device: torch.device) -> bool:
    """Returns whether ranks exchange tensors on `device` as messages (`MessageTransport`), not in collectives of `backend`."""
    return backend == "gloo" and device.type == "cpu"


def make_transport(
    members: Members, name: str, channel: dist.ProcessGroup, log: ExchangeLog, device: torch.device
) -> Transport:
    """Returns a new transport over `channel`, called `name`, for tensors on `device`. log: used by a `CollectiveTransport`."""
    if uses_messages(dist.get_backend(channel), device):
        return MessageTransport(members, name, channel)
    return CollectiveTransport(members, name, channel, log)


@cache
def installed_transports() -> tuple[TransportRecord, ...]:
    """Returns the transport records of installed packages, sorted by the names of their entry points. Raises PluginError
    `transport-import` if a record cannot be imported.
    """
    records = []
    for point in sorted(entry_points(group="sley.transports"), key=lambda point: point.name):
        try:
            records.append(point.load())
        except Exception as error:
            message = f"the transport `{point.name}` ({point.value}) cannot be imported: {type(error).__name__}: {error}"
            raise PluginError(
                "transport-import", message, hint="reinstall or uninstall the package of the transport"
            ) from error
    return tuple(records)


def find_common_transports(members: Members, channel: dist.ProcessGroup) -> tuple[TransportRecord, ...]:
    """Returns the records of the transports that all `members` have installed. A blocking collective over `channel`."""
    local = installed_transports()
    gather = partial(gather_values, [record.name for record in local], channel)
    installed = [set(names) for names in run_guarded(gather, begin_turn("comparing", members, "installed transports"))]
    return tuple(record for record in local if all(record.name in names for names in installed))


def connect_transports(
    members: Members, channels: Mapping[str, dist.ProcessGroup], records: Sequence[TransportRecord], timeout_s: float
) -> dict[str, Transport]:
    """Connects `members` by the first of `records` that can connect them, and returns transports for host tensors. The result
    has one transport for each name in `channels`. If no record can connect the members, the result is {} on all ranks. A
    collective: all members call this with equal records. timeout_s: the limit of each wait, in seconds.
    """
    for record in records:
        connect = partial(import_object(record.connect), members, channels, timeout_s)
        transports: dict[str, Transport] = run_guarded(connect, begin_turn("opening", members, record.name))
        if transports:
            return transports
    return {}


def gather_values(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns each rank's `value`, in the order of ranks. A blocking collective over `group`, by default torch's default group.
    value: can be written as JSON; tuples come back as lists, and keys of mappings as strings. torch's object collectives are
    unsafe: they unpickle messages, and any user of the host can connect to gloo's ports and send a message that runs code.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
    local = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    sizes = _gather_padded(torch.tensor([local.numel()], dtype=torch.int64, device=local.device), 1, group)
    lengths = [int(size) for size in sizes]
    texts = _gather_padded(local, max(lengths), group)  # all members see the same lengths
    return [json.loads(bytes(text[:length].tolist())) for text, length in zip(texts, lengths, strict=True)]


def _gather_padded(local: Tensor, numel: int, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Returns every rank's `local`, a 1-D tensor, padded with zeros to `numel` elements. A blocking collective over `group`."""
    outputs = [local.new_zeros(numel) for _ in range(dist.get_world_size(group))]
    dist.all_gather(outputs, torch.nn.functional.pad(local, (0, numel - local.numel())), group=group)
    return outputs

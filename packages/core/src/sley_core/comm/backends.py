"""Defines the transports of core, and chooses the transports of a group."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib.metadata import entry_points
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sley_core.comm.progress import Members, begin_turn, run_guarded
from sley_core.comm.transport import ExchangeLog, GroupWork, Headers, Mark, Transport, Work, copy_shard, gather_values
from sley_core.errors import PluginError
from sley_core.records import TransportRecord, import_object


class ChannelTransport(Transport):
    """The base class of transports between `members` over the communicator `channel`, whose name is `name`."""

    def __init__(self, members: Members, name: str, channel: dist.ProcessGroup) -> None:
        self.members = members
        self._name = name
        self._channel = channel

    def all_reduce(self, tensor: Tensor, *, label: str, contents: int = 0) -> Work:
        """Starts the backend's all-reduce. The ranks' marks are not compared."""
        turn = begin_turn("all-reduce", self.members, label, self._name, tensor.nbytes)
        return GroupWork([run_guarded(lambda: dist.all_reduce(tensor, group=self._channel, async_op=True), turn)], [], turn)


class CollectiveTransport(ChannelTransport):
    """Exchanges tensors by the backend's collectives. log: the group's exchange log."""

    is_coalesced: bool
    """Whether one call exchanges several tensors; False with gloo, whose coalesced gather would read device addresses on the
    host, and whose coalesced reduce-scatter copies and all-reduces each tensor.
    """

    def __init__(self, members: Members, name: str, channel: dist.ProcessGroup, log: ExchangeLog) -> None:
        super().__init__(members, name, channel)
        self._log = log
        self.is_coalesced = dist.get_backend(channel) != "gloo"

    def all_gather(self, tensors: Sequence[Tensor], shards: Sequence[Tensor], *, label: str) -> Work:
        return self._start("all-gather", label, shards, 0, lambda: self._start_gather(tensors, shards))

    def reduce_scatter(self, tensors: Sequence[Tensor], scratches: Sequence[Tensor], *, label: str, contents: int = 0) -> Work:
        size, coord = self.members.size, self.members.coord
        own_rows = [tensor.view(size, tensor.shape[0] // size, *tensor.shape[1:])[coord] for tensor in tensors]
        return self._start("reduce-scatter", label, tensors, contents, lambda: self._start_reduce(own_rows, tensors))

    def all_to_all(self, received: Tensor, sent: Tensor, *, label: str, contents: int = 0) -> Work:
        def start() -> list[Any]:
            return [dist.all_to_all_single(received, sent, group=self._channel, async_op=True)]

        return self._start("all-to-all", label, [sent], contents, start)

    def _start(
        self, operation: str, label: str, tensors: Sequence[Tensor], contents: int, start: Callable[[], list[Any]]
    ) -> Work:
        mark = Mark.from_tensors(operation, label, tensors, contents)
        self._log.add(self._name, mark)
        turn = begin_turn(operation, self.members, label, self._name, mark.num_bytes)
        return GroupWork(run_guarded(start, turn), [], turn)

    def _start_gather(self, tensors: Sequence[Tensor], shards: Sequence[Tensor]) -> list[Any]:
        """Starts to gather the ranks' `shards` into `tensors`, and returns the works."""
        if self.is_coalesced:
            return [self._channel.allgather_into_tensor_coalesced(list(tensors), list(shards))]
        parts = [list(tensor.view(self.members.size, *shard.shape)) for tensor, shard in zip(tensors, shards, strict=True)]
        pairs = zip(parts, shards, strict=True)
        return [dist.all_gather(rows, shard, group=self._channel, async_op=True) for rows, shard in pairs]

    def _start_reduce(self, own_rows: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Any]:
        """Starts to sum `own_rows`, this rank's rows of each of `tensors`, in place, and returns the works. The other rows are
        undefined afterwards.

        NCCL sums in place if the output is at its rank's offset in the input (user guide, "In-place Operations"). Megatron-LM
        reduces several buckets per call in this way (megatron/core/distributed/param_and_grad_buffer.py).
        """
        if self.is_coalesced:
            return [self._channel.reduce_scatter_tensor_coalesced(list(own_rows), list(tensors))]
        return [dist.all_reduce(tensor, group=self._channel, async_op=True) for tensor in tensors]


class MessageTransport(ChannelTransport):
    """Exchanges tensors as messages over gloo, except for the all-reduce: gloo's own is faster. Tensors must be on the host.

        header to every peer ──> compare the peers' headers ──> their parts, received straight into the outputs
        parts to every peer  ─────────────────────────────>

    This is two to four times as fast as gloo's own reduce-scatter, and does not copy received parts (docs/measurements.md). A
    part's tag is its mark, so gloo never matches parts of two different exchanges; if their lengths differed, gloo would end
    the process. Headers have a separate tag, and arrive in the order in which exchanges begin.
    """

    def __init__(self, members: Members, name: str, channel: dist.ProcessGroup) -> None:
        super().__init__(members, name, channel)
        self._peers = members.peers

    def all_gather(self, tensors: Sequence[Tensor], shards: Sequence[Tensor], *, label: str) -> Work:
        rows = [tensor.view(self.members.size, *shard.shape) for tensor, shard in zip(tensors, shards, strict=True)]
        places = [[row[peer] for peer in self._peers] for row in rows]
        parts = [[shard] * len(self._peers) for shard in shards]
        started = self._start_messages(places, parts, Mark.from_tensors("all-gather", label, shards), "all-gather")
        for row, shard in zip(rows, shards, strict=True):
            copy_shard(shard, row[self.members.coord])
        return started

    def num_scratch_rows(self, num_rows: int) -> int:
        """Returns the number of scratch rows for the parts of all peers: `num_rows` per peer."""
        return num_rows * len(self._peers)

    def reduce_scatter(self, tensors: Sequence[Tensor], scratches: Sequence[Tensor], *, label: str, contents: int = 0) -> Work:
        size = self.members.size
        rows = [tensor.view(size, tensor.shape[0] // size, *tensor.shape[1:]) for tensor in tensors]
        own_rows = [buffer[self.members.coord] for buffer in rows]
        arriving = [buffer.view(size - 1, *part.shape[1:]) for buffer, part in zip(scratches, rows, strict=True)]

        def finish() -> None:
            for total, received in zip(own_rows, arriving, strict=True):
                for part in received:
                    total.add_(part)

        parts = [[buffer[peer] for peer in self._peers] for buffer in rows]
        mark = Mark.from_tensors("reduce-scatter", label, tensors, contents)
        return self._start_messages([list(buffer) for buffer in arriving], parts, mark, "reduce-scatter", finish)

    def all_to_all(self, received: Tensor, sent: Tensor, *, label: str, contents: int = 0) -> Work:
        places, parts = ([[tensor[peer] for peer in self._peers]] for tensor in (received, sent))
        started = self._start_messages(places, parts, Mark.from_tensors("all-to-all", label, [sent], contents), "all-to-all")
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
        """Starts an exchange with every peer, and returns its handle.

        The i-th tensor of each row of `inputs` goes to the i-th peer, and the i-th tensor of each row of `outputs` is received
        from it. All tensors are contiguous, on the host, and must not be used until `wait_sent`. All members call this in the
        same order. mark: the mark that peers compare. operation: the name of the exchange in errors. finish: called once, after
        the last receive.
        """
        received: list[Any] = []
        sent: list[Any] = []

        def start() -> Headers:
            """Starts the header, then the receives and sends of each row; returns the headers."""
            headers = Headers(self.members, self._channel, mark)
            sent.extend(headers.sent)
            for output_row, input_row in zip(outputs, inputs, strict=True):
                for output, peer in zip(output_row, self._peers, strict=True):
                    received.append(self._channel.recv([output], peer, mark.number))
                for input_part, peer in zip(input_row, self._peers, strict=True):
                    sent.append(self._channel.send([input_part], peer, mark.number))
            return headers

        turn = begin_turn(operation, self.members, mark.label, self._name, mark.num_bytes)
        headers = run_guarded(start, turn)
        return GroupWork(received, sent, turn, finish, headers)


class SingleRankTransport(Transport):
    """The transport of a group of one rank, which copies inputs to outputs."""

    def all_gather(self, tensors: Sequence[Tensor], shards: Sequence[Tensor], *, label: str) -> Work:
        for tensor, shard in zip(tensors, shards, strict=True):
            copy_shard(shard, tensor)
        return Work()

    def reduce_scatter(self, tensors: Sequence[Tensor], scratches: Sequence[Tensor], *, label: str, contents: int = 0) -> Work:
        return Work()

    def all_to_all(self, received: Tensor, sent: Tensor, *, label: str, contents: int = 0) -> Work:
        received.copy_(sent)
        return Work()

    def all_reduce(self, tensor: Tensor, *, label: str, contents: int = 0) -> Work:
        return Work()


ENTRY_POINT_GROUP = "sley.transports"
"""The group of the entry points of packages that provide transports."""


def sends_from_host(backend: str, device: torch.device) -> bool:
    """Returns whether ranks exchange tensors on `device` as messages from host memory, not by collectives of `backend`."""
    return backend == "gloo" and device.type == "cpu"


def choose_transports(
    members: Members, channels: Mapping[str, dist.ProcessGroup], log: ExchangeLog, device: torch.device
) -> dict[str, Transport]:
    """Returns the transport of each of `channels` for tensors on `device`, which uses messages or the backend's collectives.

    log: records the backend's collectives, which carry no marks. Ranks compare their logs before a step ends.
    """
    return {
        name: MessageTransport(members, name, channel)
        if sends_from_host(dist.get_backend(channel), device)
        else CollectiveTransport(members, name, channel, log)
        for name, channel in channels.items()
    }


@cache
def installed_transports() -> tuple[TransportRecord, ...]:
    """Returns the transport records of installed packages, sorted by the names of their entry points. Raises PluginError
    "transport-import" if one cannot be imported.
    """
    records = []
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: point.name):
        try:
            records.append(point.load())
        except Exception as error:
            message = f"the transport `{point.name}` ({point.value}) cannot be imported: {type(error).__name__}: {error}"
            raise PluginError("transport-import", message, hint="reinstall its package, or uninstall it") from error
    return tuple(records)


def common_transports(members: Members, channel: dist.ProcessGroup) -> tuple[TransportRecord, ...]:
    """Returns the transports that are installed on all `members`. A blocking collective over `channel`."""
    local = installed_transports()
    gather = partial(gather_values, [record.name for record in local], channel)
    installed = [set(names) for names in run_guarded(gather, begin_turn("comparing", members, "installed transports"))]
    return tuple(record for record in local if all(record.name in names for names in installed))


def connect_transports(
    members: Members, channels: Mapping[str, dist.ProcessGroup], records: Sequence[TransportRecord], timeout_s: float
) -> dict[str, Transport]:
    """Connects `members` by the first of `records` that can connect them, for host tensors.

    Returns a transport for each of `channels`, or, on all ranks, {} if no record can connect them. All members call this with
    equal records. timeout_s: the limit of each wait.
    """
    for record in records:
        connect = partial(import_object(record.connect), members, channels, timeout_s)
        transports: dict[str, Transport] = run_guarded(connect, begin_turn("opening", members, record.name))
        if transports:
            return transports
    return {}

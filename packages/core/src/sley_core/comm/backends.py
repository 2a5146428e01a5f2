"""The transports of core: `Backend`, `Direct` and `Alone`; and the choice of a group's transport when groups are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib.metadata import entry_points
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sley_core.comm.guard import guarded, turn_of
from sley_core.comm.marks import ExchangeLog, Mark
from sley_core.comm.progress import Members
from sley_core.comm.startup import gather_values
from sley_core.comm.transport import Headers, Transport, Work, Works, all_reduced, put
from sley_core.errors import PluginError
from sley_core.records import TransportRecord

_GATHER, _REDUCE = (
    ("all_gather_single_coalesced", "reduce_scatter_single_coalesced")
    if hasattr(dist.ProcessGroup, "all_gather_single_coalesced")
    else ("allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced")
)
"""Renamed in torch 2.13."""


class Backend(Transport):
    """Asks `lane`, lane `name` of a group with the log `log`. is_coalesced: whether several tensors are one call."""

    def __init__(self, members: Members, name: str, lane: dist.ProcessGroup, log: ExchangeLog, *, is_coalesced: bool) -> None:
        self.members = members
        self._name = name
        self._lane = lane
        self._log = log
        self._is_coalesced = is_coalesced

    def all_gather(self, wholes: Sequence[Tensor], shards: Sequence[Tensor], *, what: str) -> Work:
        mark = Mark.of("all-gather", what, shards)
        self._log.add(self._name, mark)
        turn = turn_of("all-gather", self.members, what, self._name, mark.num_bytes)
        return Works(guarded(lambda: self._gather(wholes, shards), turn), [], turn)

    def reduce_scatter(self, wholes: Sequence[Tensor], scratches: Sequence[Tensor], *, what: str, contents: int = 0) -> Work:
        size, coord = self.members.size, self.members.coord
        own = [whole.view(size, whole.shape[0] // size, *whole.shape[1:])[coord] for whole in wholes]
        mark = Mark.of("reduce-scatter", what, wholes, contents)
        self._log.add(self._name, mark)
        turn = turn_of("reduce-scatter", self.members, what, self._name, mark.num_bytes)
        return Works(guarded(lambda: self._reduce(own, wholes), turn), [], turn)

    def all_to_all(self, received: Tensor, sent: Tensor, *, what: str, contents: int = 0) -> Work:
        self._log.add(self._name, Mark.of("all-to-all", what, [sent], contents))
        turn = turn_of("all-to-all", self.members, what, self._name, sent.nbytes)
        work = guarded(lambda: dist.all_to_all_single(received, sent, group=self._lane, async_op=True), turn)
        return Works([work], [], turn)

    def all_reduce(self, tensor: Tensor, *, what: str, contents: int = 0) -> Work:
        return all_reduced(tensor, self.members, self._name, self._lane, what)

    def _gather(self, wholes: Sequence[Tensor], shards: Sequence[Tensor]) -> list[Any]:
        """Starts to fill each of `wholes` with the ranks' `shards`; returns the works to wait for."""
        if self._is_coalesced:
            return [getattr(self._lane, _GATHER)(list(wholes), list(shards))]
        parts = [list(whole.view(self.members.size, *shard.shape)) for whole, shard in zip(wholes, shards, strict=True)]
        pairs = zip(parts, shards, strict=True)
        return [dist.all_gather(rows, shard, group=self._lane, async_op=True) for rows, shard in pairs]

    def _reduce(self, own: Sequence[Tensor], wholes: Sequence[Tensor]) -> list[Any]:
        """Starts to sum `own`, this rank's rows of each of `wholes`, in place; the other rows are undefined afterwards.

        NCCL sums in place where an output is at its rank's offset in the input (user guide, "In-place Operations"). Megatron-LM
        reduces its buckets so, several in one call (megatron/core/distributed/param_and_grad_buffer.py).
        """
        if self._is_coalesced:
            return [getattr(self._lane, _REDUCE)(list(own), list(wholes))]
        return [dist.all_reduce(whole, group=self._lane, async_op=True) for whole in wholes]


def can_coalesce(lane: dist.ProcessGroup) -> bool:
    """Returns whether the backend takes several tensors in one call, on any device that it serves.

    gloo does not: its coalesced gather hands a device's addresses to the host, and its coalesced reduce-scatter is one
    all-reduce per tensor, each of a copy.
    """
    return bool(dist.get_backend(lane) != "gloo")


class Direct(Transport):
    """Sends by `lane`, a communicator of gloo, which is lane `name` of a group; tensors are on the host.

        header to every peer ──> headers of the peers, compared ──> what comes from them, which had its place from the start
        parts to every peer  ──────────────────────────────────────>

    Two to four times faster than gloo's own reduce-scatter, and what is received needs no copy (docs/measurements.md). The tags
    of the parts say their mark, so that gloo never puts a part of something else into a place: it would end the process where
    the lengths differ. Headers have a tag of their own and come in the order in which exchanges begin.
    """

    def __init__(self, members: Members, name: str, lane: dist.ProcessGroup) -> None:
        self.members = members
        self._name = name
        self._lane = lane
        self._peers = members.peers

    def all_gather(self, wholes: Sequence[Tensor], shards: Sequence[Tensor], *, what: str) -> Work:
        rows = [whole.view(self.members.size, *shard.shape) for whole, shard in zip(wholes, shards, strict=True)]
        places = [[whole[peer] for peer in self._peers] for whole in rows]
        parts = [[shard] * len(self._peers) for shard in shards]
        started = self._pass_around(places, parts, Mark.of("all-gather", what, shards), "all-gather")
        for whole, shard in zip(rows, shards, strict=True):
            put(shard, whole[self.members.coord])
        return started

    def num_scratch_rows(self, num_rows: int) -> int:
        """Returns the rows for what comes from all peers, which arrives beside the whole: `num_rows` for each of them."""
        return num_rows * len(self._peers)

    def reduce_scatter(self, wholes: Sequence[Tensor], scratches: Sequence[Tensor], *, what: str, contents: int = 0) -> Work:
        size = self.members.size
        rows = [whole.view(size, whole.shape[0] // size, *whole.shape[1:]) for whole in wholes]
        own = [one[self.members.coord] for one in rows]
        arriving = [one.view(size - 1, *part.shape[1:]) for one, part in zip(scratches, rows, strict=True)]

        def finish() -> None:
            for total, received in zip(own, arriving, strict=True):
                for part in received:
                    total.add_(part)

        parts = [[one[peer] for peer in self._peers] for one in rows]
        mark = Mark.of("reduce-scatter", what, wholes, contents)
        return self._pass_around([list(one) for one in arriving], parts, mark, "reduce-scatter", finish)

    def all_to_all(self, received: Tensor, sent: Tensor, *, what: str, contents: int = 0) -> Work:
        places, parts = ([[whole[peer] for peer in self._peers]] for whole in (received, sent))
        started = self._pass_around(places, parts, Mark.of("all-to-all", what, [sent], contents), "all-to-all")
        received[self.members.coord].copy_(sent[self.members.coord])
        return started

    def all_reduce(self, tensor: Tensor, *, what: str, contents: int = 0) -> Work:
        """Starts gloo's own ring, which is faster than messages to every other. Nothing checks that the ranks sum the same."""
        return all_reduced(tensor, self.members, self._name, self._lane, what)

    def _pass_around(
        self,
        places: Sequence[Sequence[Tensor]],
        parts: Sequence[Sequence[Tensor]],
        mark: Mark,
        operation: str,
        finish: Callable[[], None] | None = None,
    ) -> Work:
        """Starts to send the i-th peer the i-th tensor of every row of `parts`, and to receive from it into the i-th of every
        row of `places`; returns the exchange's handle.

        All are contiguous, on the host, and must not be touched until `wait_sent`. All members call this in one order. mark:
        what is exchanged, which peers' headers are compared with. operation: for errors. finish: called once, when all was
        received.
        """
        received: list[Any] = []
        sent: list[Any] = []

        def start() -> Headers:
            """Starts the header, then all receives, then all sends of each row; returns the headers."""
            headers = Headers(self.members, self._lane, mark)
            sent.extend(headers.sent)
            for into, out in zip(places, parts, strict=True):
                for place, peer in zip(into, self._peers, strict=True):
                    received.append(self._lane.recv([place], peer, mark.number))
                for part, peer in zip(out, self._peers, strict=True):
                    sent.append(self._lane.send([part], peer, mark.number))
            return headers

        turn = turn_of(operation, self.members, mark.what, self._name, mark.num_bytes)
        headers = guarded(start, turn)
        return Works(received, sent, turn, finish, headers)


class Done(Work):
    """An exchange that is over."""

    def test(self) -> bool:
        return True

    def wait(self) -> None:
        """The result is there."""

    def release(self) -> None:
        """Nothing is held."""

    def wait_sent(self) -> None:
        """Nothing is read."""


class Alone(Transport):
    """Copies where a result has memory of its own."""

    def all_gather(self, wholes: Sequence[Tensor], shards: Sequence[Tensor], *, what: str) -> Work:
        for whole, shard in zip(wholes, shards, strict=True):
            put(shard, whole)
        return Done()

    def reduce_scatter(self, wholes: Sequence[Tensor], scratches: Sequence[Tensor], *, what: str, contents: int = 0) -> Work:
        return Done()

    def all_to_all(self, received: Tensor, sent: Tensor, *, what: str, contents: int = 0) -> Work:
        received.copy_(sent)
        return Done()

    def all_reduce(self, tensor: Tensor, *, what: str, contents: int = 0) -> Work:
        return Done()


GROUP = "sley.transports"


def is_from_host(backend: str, device: torch.device) -> bool:
    """Returns whether ranks exchange tensors on `device` from host memory, and not by `backend`'s own collectives."""
    return backend == "gloo" and device.type == "cpu"


def message_transports(
    members: Members, lanes: Mapping[str, dist.ProcessGroup], log: ExchangeLog, device: torch.device
) -> dict[str, Transport]:
    """Returns a transport by messages, or by the backend's own collectives, for each of `lanes`, for tensors on `device`.

    log: notes what the backend's collectives exchange, which carry no mark; ranks compare it before a step ends.
    """
    transports: dict[str, Transport] = {}
    for name, lane in lanes.items():
        if is_from_host(dist.get_backend(lane), device):
            transports[name] = Direct(members, name, lane)
        else:
            transports[name] = Backend(members, name, lane, log, is_coalesced=can_coalesce(lane))
    return transports


@cache
def installed_transports() -> tuple[TransportRecord, ...]:
    """Returns the transports that installed packages bring, sorted by name. Raises PluginError "transport-import"."""
    records = []
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        try:
            records.append(point.load())
        except Exception as error:
            message = f"the transport `{point.name}` ({point.value}) cannot be imported: {type(error).__name__}: {error}"
            raise PluginError("transport-import", message, hint="reinstall its package, or uninstall it") from error
    return tuple(records)


def common_transports(everyone: Members, lane: dist.ProcessGroup) -> tuple[TransportRecord, ...]:
    """Returns the installed transports that every rank has, since connecting is a collective; so is this."""
    mine = installed_transports()
    gather = partial(gather_values, [record.name for record in mine], lane)
    theirs = [set(names) for names in guarded(gather, turn_of("comparing", everyone, "installed transports"))]
    return tuple(record for record in mine if all(record.name in names for names in theirs))


def connected(
    members: Members, lanes: Mapping[str, dist.ProcessGroup], records: Sequence[TransportRecord], timeout_s: float
) -> dict[str, Transport]:
    """Connects `members` by the first of `records` that can, for tensors on the host; returns a transport for each of `lanes`,
    or {} on all ranks. All members call it, with equal records. timeout_s: of every wait.
    """
    for record in records:
        connect = partial(record.load(record.connect), members, lanes, timeout_s)
        found: dict[str, Transport] = guarded(connect, turn_of("opening", members, record.name))
        if found:
            return found
    return {}

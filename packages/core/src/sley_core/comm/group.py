"""Defines a group of ranks with its collectives and messages, and makes a run's groups. Errors name the group and the content.

Communicators are made from the topology's table of groups. All ranks process its lines in the same order, and join those that
name them. After start-up nothing runs on the default group, and only this module calls `new_group`. A fake world (`Simulation`)
has the same groups, with torch's backend "fake" and transports that exchange nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from sley_core.comm.backends import (
    SingleRankTransport,
    choose_transports,
    common_transports,
    connect_transports,
    sends_from_host,
)
from sley_core.comm.progress import COLLECTIVE_HINT, Members, Progress, begin_turn, first_line, run_guarded
from sley_core.comm.transport import ExchangeLog, GroupWork, Transport, Work, gather_values
from sley_core.errors import RunError
from sley_core.topology import AXES, DEFAULT_CHANNEL, TIE_PREFIX, GroupEntry, Topology

Op = Literal["sum", "max", "min"]

Exchange = Op | Literal["all_gather", "all_to_all", "send", "receive"]
"""The type of an exchange; for an all-reduce, its reduction."""

OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

all_gather_single = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
"""`dist.all_gather_single`, whose name before torch 2.13 is `all_gather_into_tensor`."""


@dataclass(frozen=True)
class Group(Members):
    """Holds the ranks of one axis with which this rank communicates, with one communicator and one transport per channel.

    A group of one rank has no communicator, and every collective on it is the identity. log: records the exchanges that carry
    no marks. simulation: simulates exchanges in a fake world; None in a real one.

    In the methods below, tensors are contiguous, all members make the same collective calls on a channel in the same order, and
    `label` describes the content in errors.
    """

    channels: dict[str, dist.ProcessGroup]
    transports: dict[str, Transport] = field(default_factory=dict)
    log: ExchangeLog = field(default_factory=ExchangeLog)
    simulation: "Simulation | None" = field(default=None, compare=False, repr=False)

    @property
    def has_peers(self) -> bool:
        return self.size > 1 and self.simulation is None

    def channel(self, name: str = DEFAULT_CHANNEL) -> dist.ProcessGroup:
        """Returns the communicator of the channel `name`. A group of one rank has no communicators."""
        return self.channels[name]

    def transport(self, channel: str = DEFAULT_CHANNEL) -> Transport:
        """Returns the transport of `channel`. Call this at each use: after `Groups.close` a kept transport must not be used."""
        return SingleRankTransport() if self.size == 1 else self.transports[channel]

    def all_reduce(self, tensor: Tensor, op: Op = "sum", *, label: str) -> Work:
        """Starts an all-reduce of `tensor` in place, and returns its handle."""
        return self._start(op, partial(dist.all_reduce, tensor, OPS[op], async_op=True), tensor, tensor, label)

    def all_to_all(
        self,
        output: Tensor,
        tensor: Tensor,
        *,
        label: str,
        channel: str = DEFAULT_CHANNEL,
        splits: tuple[list[int], list[int]] = ([], []),
    ) -> Work:
        """Starts an all-to-all, and returns its handle. Slice i of `tensor` goes to the i-th rank, and slice i of `output`
        comes from it. splits: the sizes of the slices of `output` and `tensor` along dim 0; by default, equal slices.
        """
        start = partial(dist.all_to_all_single, output, tensor, *splits, async_op=True)
        return self._start("all_to_all", start, output, tensor, label, channel)

    def all_gather(self, output: Tensor, tensor: Tensor, *, label: str, channel: str = DEFAULT_CHANNEL) -> Work:
        """Starts an all-gather of the ranks' `tensor` along dim 0 of `output`, in the group's order. Returns its handle."""
        start = partial(all_gather_single, output, tensor, async_op=True)
        return self._start("all_gather", start, output, tensor, label, channel)

    def send(self, tensor: Tensor, channel: str, peer: int, *, label: str) -> Work:
        """Starts to send `tensor` to the member at coordinate `peer` on `channel`, and returns the handle.

        Calls the communicator directly, which numbers members as the group does: a fifth of the time of `dist.isend` is
        overhead.
        """

        def start(group: dist.ProcessGroup) -> Any:
            message = tensor.to("cpu", copy=True) if self.needs_host_copy(tensor, channel) else tensor
            return group.send([message], peer, 0)

        return self._start("send", start, tensor, tensor, label, channel, (self.coord, peer))

    def receive(self, tensor: Tensor, channel: str, peer: int, *, label: str) -> Work:
        """Starts to receive into `tensor` from the member at coordinate `peer`, and returns the handle."""
        is_copied = self.simulation is None and self.needs_host_copy(tensor, channel)
        buffer = torch.empty_like(tensor, device="cpu") if is_copied else tensor
        finish = partial(tensor.copy_, buffer) if is_copied else None
        ends = peer, self.coord
        return self._start("receive", lambda group: group.recv([buffer], peer, 0), tensor, tensor, label, channel, ends, finish)

    def gather_objects(self, value: Any, *, label: str) -> list[Any]:
        """Returns the `value` of each member, in the order of ranks. A blocking collective.

        value: small and serialisable as JSON. In a fake world, the result repeats this rank's value.
        """
        if not self.has_peers:
            return [value] * self.size
        turn = begin_turn("all-gather of objects", self, label)
        values: list[Any] = run_guarded(lambda: gather_values(value, self.channel()), turn)
        return values

    def _start(
        self,
        kind: Exchange,
        start: Callable[..., Any],
        result: Tensor,
        tensor: Tensor,
        label: str,
        channel: str = DEFAULT_CHANNEL,
        ends: tuple[int, int] | None = None,
        finish: Callable[[], object] | None = None,
    ) -> Work:
        """Starts an exchange by `start(group=...)`, which sends `tensor` and fills `result`. Returns its handle.

        ends: the coordinates of a message's sender and receiver; None for a collective. finish: called once, after the
        exchange.
        """
        if self.size == 1:
            if result is not tensor:
                result.copy_(tensor)
            return Work()
        if self.simulation is not None:
            return GroupWork([], _finish=self.simulation.simulate_exchange(self, kind, result, tensor, channel, label))
        operation = "all-reduce" if kind in OPS else kind.replace("_", "-")
        turn = begin_turn(operation, self, label, channel, tensor.nbytes, ends)
        return GroupWork([run_guarded(lambda: start(group=self.channel(channel)), turn)], (), turn, finish)

    def needs_host_copy(self, tensor: Tensor, channel: str) -> bool:
        """Returns whether an exchange of `tensor` on `channel` needs a copy on the host, since gloo reads only host memory."""
        return tensor.device.type != "cpu" and dist.get_backend(self.channel(channel)) == "gloo"


_HOST = torch.device("cpu")


class Groups(dict[str, Group]):
    """Maps each axis to this rank's group: `groups["dp"]`. progress: this rank's exchanges in all groups."""

    def __init__(self, groups: Mapping[str, Group], progress: Progress | None = None) -> None:
        super().__init__(groups)
        self.progress = progress or Progress()

    def close(self) -> None:
        """Drops all communicators, so that their threads end before the interpreter exits.

        A gloo thread may free a tensor some time after its result is complete. In an exiting interpreter this aborts the
        process (exit status -6); without `close`, it happens in one of five successful runs.
        """
        for group in self.values():
            group.channels.clear()
            group.transports.clear()


def make_groups(
    topology: Topology,
    rank: int,
    *,
    backend: str,
    timeout: timedelta,
    extra: Sequence[GroupEntry] = (),
    device: torch.device = _HOST,
    cross_memory: bool = False,
    simulation: "Simulation | None" = None,
) -> Groups:
    """Returns the groups of `rank`. All ranks of the world call this once, with equal tables.

    Every rank also calls `new_group` for the lines that do not name it, which takes 12 us each: torch names a group by the
    number of earlier groups. `use_local_synchronization` would not help: torch still counts, and hangs if one member has joined
    more groups than another, as with ties of the stages (1, 2) and (2, 3).

    backend: the backend of lines that are not marked `gloo`; "fake" in a fake world. extra: the lines of plugins' groups; a
    rank that no line of such an axis names gets a group of one. device: the device of exchanged tensors. cross_memory: whether
    ranks that share weights or sequences, or sum gradients, may use cross-memory attach; it has no effect unless tensors are on
    the host and the backend is gloo. simulation: replaces the peers of a fake world. Lines with the same members, channel and
    backend share one communicator, since all members start their exchanges in the same order anyway.

    Raises RunError `group-failed` if a communicator cannot be created, for example because a member does not join within
    `timeout`.
    """
    channels: dict[str, dict[str, dist.ProcessGroup]] = {}
    communicators: dict[tuple[tuple[int, ...], str, str], dist.ProcessGroup | None] = {}
    lines = []
    for entry in [*topology.groups(), *extra]:
        is_member = rank in entry.ranks
        if is_member:
            lines.append(entry)
        if len(entry.ranks) == 1 or (simulation is not None and not is_member):
            continue
        backend_name = "gloo" if entry.backend == "gloo" and simulation is None else backend
        key = (entry.ranks, entry.channel, backend_name)
        if key not in communicators:
            communicators[key] = make_communicator(entry, rank, backend_name, timeout)
        communicator = communicators[key]
        assert (communicator is not None) == is_member, f"rank {rank} of {entry.label}: {communicator}"
        if communicator is not None:
            channels.setdefault(entry.axis, {})[entry.channel] = communicator
    progress = Progress()
    axes_with_memory = axes_with_cma(topology, extra) if cross_memory else ()
    groups = {}
    ranks_by_axis = {entry.axis: entry.ranks for entry in lines}
    for axis in (*AXES, *(entry.axis for entry in extra if not entry.axis.startswith(TIE_PREFIX))):
        ranks_by_axis.setdefault(axis, (rank,))
    for axis, ranks in ranks_by_axis.items():
        members, log, axis_channels = Members(axis, ranks, rank, progress=progress), ExchangeLog(), channels.get(axis, {})
        if simulation is None:
            transports = choose_transports(members, axis_channels, log, device)
        else:
            transports = simulation.transports(members, axis_channels, cross_memory=axis in axes_with_memory)
        groups[axis] = Group(axis, ranks, rank, axis_channels, transports, log, simulation, progress=progress)
    if simulation is None and cross_memory and topology.world_size > 1 and sends_from_host(backend, device):
        records = common_transports(groups["control"], channels["control"][DEFAULT_CHANNEL])
        # Connecting is a collective: all ranks connect the same axes in the same order.
        for group in (groups[axis] for axis in axes_with_memory):
            if group.size > 1:
                same = Members(group.axis, group.ranks, group.rank, progress=group.progress)
                group.transports.update(connect_transports(same, group.channels, records, timeout.total_seconds()))
    return Groups(groups, progress)


def axes_with_cma(topology: Topology, extra: Sequence[GroupEntry]) -> tuple[str, ...]:
    """Returns the axes whose exchanges may use cross-memory attach, including those of `extra` that request it."""
    weights = ("wp", "stage", "wdp") if topology.wp > 1 else ("stage",)
    sequences = ("sp",) if topology.sp > 1 else ()
    return (*weights, *sequences, *dict.fromkeys(entry.axis for entry in extra if entry.cross_memory))


def make_communicator(entry: GroupEntry, rank: int, backend: str, timeout: timedelta) -> dist.ProcessGroup | None:
    """Returns a new communicator; None outside the group. All ranks call it. Raises RunError `group-failed` if torch fails."""
    try:
        with _unbind_default_group() if backend == "gloo" else nullcontext():
            group = dist.new_group(list(entry.ranks), backend=backend, timeout=timeout, group_desc=entry.label)
    except RuntimeError as error:
        message = f"the process group {entry.label} could not be created on rank {rank}: {first_line(error)}"
        raise RunError("group-failed", message, hint=COLLECTIVE_HINT) from error
    return group if isinstance(group, dist.ProcessGroup) else None


@contextmanager
def _unbind_default_group() -> Iterator[None]:
    """Unbinds the default group from its device within the block, so that torch can create a gloo group beside NCCL.

    If the default group is bound to a device, as with NCCL, the ranks outside a new group join a split of the default
    communicator. The ranks inside split it only for an NCCL group, so with a gloo group the others would wait forever.
    """
    default = dist.group.WORLD
    bound = None if default is None else default.bound_device_id
    if default is None or bound is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound


class SilentTransport(SingleRankTransport):
    """A transport that exchanges no data: output tensors keep their contents."""

    def all_gather(self, tensors: Sequence[Tensor], shards: Sequence[Tensor], *, label: str) -> Work:
        return Work()

    def all_to_all(self, received: Tensor, sent: Tensor, *, label: str, contents: int = 0) -> Work:
        return Work()


class Simulation:
    """Replaces the communication of a fake world. This class exchanges nothing, so output tensors keep their contents."""

    def transports(
        self, members: Members, channels: Mapping[str, dist.ProcessGroup], *, cross_memory: bool
    ) -> dict[str, Transport]:
        """Returns a transport for each of `channels`. cross_memory: whether ranks of one host read each other's memory."""
        return dict.fromkeys(channels, SilentTransport())

    def simulate_exchange(
        self, members: Members, kind: Exchange, result: Tensor, tensor: Tensor, channel: str, label: str
    ) -> Callable[[], None]:
        """Simulates an exchange by `members` on `channel` that sends `tensor` and fills `result`, which may be the same tensor.
        Returns a function that is called when the rank waits for the exchange. label: describes the content in errors.
        """
        return do_nothing

    def announced(self, plan: Any, stage: Any, dataset: Any, dtype: torch.dtype) -> Callable[[int, int], Any] | None:
        """Returns a function `(stage, chunk)` that describes the output of another stage's chunk, or None if no steps are run
        or there is only one stage. stage: the run's stage, with all layers of the model on meta. dtype: the parameters' dtype.
        """
        return None

    def fill(self, layers: Sequence[Any], dtype: torch.dtype) -> None:
        """Replaces the meta tensors of this rank's sharded layers by tensors of `dtype` for a step. This class does nothing."""


def do_nothing() -> None:
    """Does nothing. `Simulation` returns it as the wait for an exchange."""

"""Makes communicators from the topology's table. All ranks process it in one order and join the lines that name them.

Nothing runs on the default group after start-up, and `new_group` is called only here. A fake world (`Simulation`) has the same
groups, with torch's backend "fake", and transports that exchange nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

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
from sley_core.comm.group import Exchange, Group, Imitate
from sley_core.comm.progress import COLLECTIVE_HINT, Members, Progress, first_line
from sley_core.comm.transport import ExchangeLog, Transport, Work
from sley_core.errors import RunError
from sley_core.topology import AXES, DEFAULT_CHANNEL, TIE, GroupEntry, Topology

_HOST = torch.device("cpu")


class Groups(Mapping[str, Group]):
    """Maps each axis to this rank's group: `groups["dp"]`. progress: this rank's exchanges in all groups."""

    def __init__(self, groups: Mapping[str, Group], progress: Progress | None = None) -> None:
        self._groups = dict(groups)
        self.progress = progress or Progress()

    def __getitem__(self, axis: str) -> Group:
        return self._groups[axis]

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def close(self) -> None:
        """Drops all communicators, so that their threads end before the interpreter exits.

        A gloo thread frees a tensor some time after its result is complete. In an exiting interpreter that aborts the process
        (exit status -6): without `close`, in one of five successful runs.
        """
        for group in self._groups.values():
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
    simulation: Simulation | None = None,
) -> Groups:
    """Returns the groups of `rank`. All ranks of the world call this once, with equal tables.

    Lines that do not name `rank` cost 12 us each: torch names a group by the number of earlier groups. With
    `use_local_synchronization` torch still counts, and hangs if one member has joined more groups than another, as with ties of
    stages (1, 2) and (2, 3).

    device: the device of exchanged tensors. cross_memory: whether ranks that share weights or sequences, or sum gradients, may
    use cross-memory attach; only on the host, with gloo. extra: plugins' groups; a rank that no line of such an axis names has
    a group of one. backend: the backend of lines that are not marked `gloo`. Lines with the same members and channel share one
    communicator, since all members start their exchanges in one order anyway. simulation: replaces the peers of a fake world,
    whose backend is "fake".

    Raises RunError `group-failed` if a member does not join within `timeout`.
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
    for axis, ranks in members_of(lines, extra, rank).items():
        members, log, axis_channels = Members(axis, ranks, rank, progress=progress), ExchangeLog(), channels.get(axis, {})
        imitate: Imitate | None = None
        if simulation is None:
            transports = choose_transports(members, axis_channels, log, device)
        else:
            transports = simulation.transports(members, axis_channels, cross_memory=axis in axes_with_memory)
            imitate = partial(simulation.imitate, members)
        groups[axis] = Group(axis, ranks, rank, axis_channels, transports, log, imitate, progress=progress)
    if simulation is None and cross_memory and topology.world > 1 and sends_from_host(backend, device):
        records = common_transports(groups["control"], channels["control"][DEFAULT_CHANNEL])
        # Connecting is a collective: all ranks connect the same axes in the same order.
        for group in (groups[axis] for axis in axes_with_memory):
            if group.size > 1:
                same = Members(group.axis, group.ranks, group.rank, progress=group.progress)
                group.transports.update(connect_transports(same, group.channels, records, timeout.total_seconds()))
    return Groups(groups, progress)


def members_of(lines: Iterable[GroupEntry], extra: Iterable[GroupEntry], rank: int) -> dict[str, tuple[int, ...]]:
    """Returns the ranks of this rank's group by axis; only `rank` without a line. extra: the lines of plugins and ties."""
    axes = (*AXES, *(entry.axis for entry in extra if not entry.axis.startswith(TIE)))
    ranks = {entry.axis: entry.ranks for entry in lines}
    return ranks | {axis: (rank,) for axis in axes if axis not in ranks}


def axes_with_cma(topology: Topology, extra: Sequence[GroupEntry]) -> tuple[str, ...]:
    """Returns the axes whose exchanges may use cross-memory attach, including those of `extra` that request it."""
    weights = ("wp", "stage", "wdp") if topology.wp > 1 else ("stage",)
    sequences = ("sp",) if topology.sp > 1 else ()
    return (*weights, *sequences, *dict.fromkeys(entry.axis for entry in extra if entry.cross_memory))


def make_communicator(entry: GroupEntry, rank: int, backend: str, timeout: timedelta) -> dist.ProcessGroup | None:
    """Returns a new communicator, or None on a rank outside the group. All ranks call it. Raises RunError `group-failed`."""
    try:
        with _unbind_default_group() if backend == "gloo" else nullcontext():
            group = dist.new_group(list(entry.ranks), backend=backend, timeout=timeout, group_desc=entry.label)
    except RuntimeError as error:
        message = f"the process group {entry.label} could not be created on rank {rank}: {first_line(error)}"
        raise RunError("group-failed", message, hint=COLLECTIVE_HINT) from error
    return group if isinstance(group, dist.ProcessGroup) else None


@contextmanager
def _unbind_default_group() -> Iterator[None]:
    """Returns a context manager in which torch can make a gloo group beside NCCL.

    If the default group is bound to a device, as with NCCL, the ranks outside a new group join a split of the default
    communicator. The ranks inside split it only for an NCCL group, so the others would wait forever for a gloo group.
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
    """A transport that exchanges no data, so that results keep their contents."""

    def all_gather(self, tensors: Sequence[Tensor], shards: Sequence[Tensor], *, label: str) -> Work:
        return Work()

    def all_to_all(self, received: Tensor, sent: Tensor, *, label: str, contents: int = 0) -> Work:
        return Work()


class Simulation:
    """Replaces the communication of a fake world; without a subclass, results keep their contents."""

    def transports(
        self, members: Members, channels: Mapping[str, dist.ProcessGroup], *, cross_memory: bool
    ) -> dict[str, Transport]:
        """Returns a transport for each of `channels`. cross_memory: whether ranks of one host read each other's memory."""
        return dict.fromkeys(channels, SilentTransport())

    def imitate(
        self, members: Members, kind: Exchange, result: Tensor, tensor: Tensor, channel: str, label: str
    ) -> Callable[[], None]:
        """Simulates an exchange of `members`, as `Imitate` describes."""
        return do_nothing

    def announced(self, plan: Any, stage: Any, dataset: Any, dtype: torch.dtype) -> Callable[[int, int], Any] | None:
        """Returns a function (stage, chunk) that describes the output of another stage's chunk, or None if no steps are run or
        there is only one stage. stage: the stage, with all layers of the model on meta. dtype: the parameters' dtype.
        """
        return None

    def fill(self, layers: Sequence[Any], dtype: torch.dtype) -> None:
        """Replaces the meta tensors of this rank's sharded layers by tensors of `dtype` for a step. This class does nothing."""


def do_nothing() -> None:
    """Does nothing: the wait for a simulated exchange that is complete."""

"""Communicators, made from the topology's table: all ranks walk it in one order and join the lines that name them.

Nothing runs on the default group after start-up, and nobody else calls `new_group`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from sley_core.comm.exchange_log import ExchangeLog
from sley_core.comm.host_memory import HostMemory
from sley_core.errors import RunError
from sley_core.topology import AXES, DEFAULT_LANE, LANES, TIE, GroupEntry, Topology

SHARED = "shared"
"""The memory, beside those of the lanes, of what stays readable for a whole step: however many exchanges come in between,
none of them has to wait until its place among the offers is free."""


@dataclass(frozen=True)
class Group:
    """The ranks of one axis that this rank talks to, with one communicator per lane.

    ranks: global, ascending. A group of one rank has no communicator, and every collective on it is the identity.
    memories: for those lanes whose ranks can read each other's memory, and `SHARED`. log: of the exchanges in which
    nothing says what they are.
    """

    axis: str
    ranks: tuple[int, ...]
    rank: int
    lanes: dict[str, dist.ProcessGroup]
    memories: dict[str, HostMemory] = field(default_factory=dict)
    log: ExchangeLog = field(default_factory=ExchangeLog)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def coord(self) -> int:
        """This rank's place among `ranks`."""
        return self.ranks.index(self.rank)

    def lane(self, name: str = DEFAULT_LANE) -> dist.ProcessGroup:
        """The communicator of lane `name`; only a group of two or more has one."""
        return self.lanes[name]

    def __str__(self) -> str:
        return f"{self.axis}{list(self.ranks)}"


class Groups(Mapping[str, Group]):
    """`groups["dp"]` is this rank's group on axis `dp`.

    reads_memory: whether ranks may read each other's memory, where they can (`HostMemory.open`).
    """

    def __init__(self, groups: Mapping[str, Group], *, reads_memory: bool = False) -> None:
        self._groups = dict(groups)
        self.reads_memory = reads_memory

    def __getitem__(self, axis: str) -> Group:
        return self._groups[axis]

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def close(self) -> None:
        """Lets go of every communicator, so that their threads end now and not while the interpreter ends.

        A thread of gloo frees a tensor some time after its result was there. Doing so in an interpreter that is ending
        would abort the process (exit status -6), in one of five runs that had succeeded.
        """
        for group in self._groups.values():
            group.lanes.clear()
            group.memories.clear()


def make_groups(
    topology: Topology,
    rank: int,
    *,
    backend: str,
    timeout: timedelta,
    extra: Sequence[GroupEntry] = (),
    reads_memory: bool = False,
) -> Groups:
    """Joins every line of the table that names `rank`; every rank of the world calls this once, with equal tables.

    Lines that do not name it are walked too, at 12 us each: torch names a group by how many there were before it. Named
    by the members alone (`use_local_synchronization`) it still counts, and waits for ever where one member has joined
    more groups than another, as with ties of stages (1, 2) and (2, 3).

    reads_memory: whether ranks may read each other's memory, where they can; only for tensors on the host, so never beside
    another backend than gloo. Opened here for ranks that share weights.
    extra: a rank that is in none of the lines of a plugin's axis has a group of its own there.
    backend: of the device's lines; lines marked `gloo` keep it. Two lines with the same members and lane share one
    communicator: what runs on them is issued in one order by all members anyway.
    Raises RunError `group-failed` where a member does not come within `timeout`.
    """
    lanes: dict[str, dict[str, dist.ProcessGroup]] = {}
    members: dict[str, tuple[int, ...]] = {}
    shared: dict[tuple[tuple[int, ...], str, str], dist.ProcessGroup | None] = {}
    for entry in [*topology.groups(), *extra]:
        is_member = rank in entry.ranks
        if is_member:
            members[entry.axis] = entry.ranks
        elif backend == "fake":  # nobody else is there to count with
            continue
        if len(entry.ranks) == 1:
            continue
        used = "gloo" if entry.backend == "gloo" and backend != "fake" else backend
        key = (entry.ranks, entry.lane, used)
        if key not in shared:
            shared[key] = _new_group(entry, rank, used, timeout)
        joined = shared[key]
        assert (joined is not None) == is_member, f"rank {rank} of {entry.label}: {joined}"
        if joined is not None:
            lanes.setdefault(entry.axis, {})[entry.lane] = joined
    for axis in (*AXES, *(entry.axis for entry in extra if not entry.axis.startswith(TIE))):
        members.setdefault(axis, (rank,))
    groups = Groups(
        {axis: Group(axis, ranks, rank, lanes.get(axis, {})) for axis, ranks in members.items()},
        reads_memory=reads_memory and backend == "gloo",
    )
    shares = groups["wp"]
    for use in (*LANES["wp"], SHARED) if groups.reads_memory and shares.size > 1 else ():
        lane = use if use in LANES["wp"] else LANES["wp"][0]
        memory = HostMemory.open(shares, lane, timeout.total_seconds())
        if memory is not None:
            shares.memories[use] = memory
    return groups


def _new_group(entry: GroupEntry, rank: int, backend: str, timeout: timedelta) -> dist.ProcessGroup | None:
    """The group, or None on a rank outside of it."""
    try:
        group = dist.new_group(
            list(entry.ranks),
            backend=backend,
            timeout=timeout,
            group_desc=entry.label,
        )
    except RuntimeError as error:
        raise RunError(
            "group-failed",
            f"the group {entry.label} could not be made on rank {rank}: {first_line(error)}",
            hint="another rank of the group stopped, or did not come within [limits] collective_timeout_s",
        ) from error
    return group if isinstance(group, dist.ProcessGroup) else None


def first_line(error: BaseException) -> str:
    """What an error of torch says, without the C++ stack that follows it; its kind where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

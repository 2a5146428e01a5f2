"""Makes communicators from the topology's table: all ranks walk it in one order and join the lines that name them.

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

from sley_core.comm.backends import Alone, Done, common_transports, connected, is_from_host, message_transports
from sley_core.comm.group import Exchange, Group
from sley_core.comm.guard import HINT, first_line
from sley_core.comm.marks import ExchangeLog
from sley_core.comm.progress import Members, Progress
from sley_core.comm.transport import Transport, Work
from sley_core.errors import RunError
from sley_core.topology import AXES, DEFAULT_LANE, TIE, GroupEntry, Topology

_HOST = torch.device("cpu")


class Groups(Mapping[str, Group]):
    """Maps each axis to this rank's group: `groups["dp"]`. progress: what this rank has exchanged in all of them."""

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
        """Drops every communicator, so that their threads end now and not while the interpreter exits.

        A thread of gloo frees a tensor some time after its result was there. Doing so in an interpreter that is exiting aborts
        the process (exit status -6); without this it happened in one of five runs that had succeeded.
        """
        for group in self._groups.values():
            group.lanes.clear()
            group.transports.clear()
        self.progress.store = None  # it would keep a communicator's store, and the launcher's, alive


def make_groups(
    topology: Topology,
    rank: int,
    *,
    backend: str,
    timeout: timedelta,
    extra: Sequence[GroupEntry] = (),
    device: torch.device = _HOST,
    attaches: bool = False,
) -> Groups:
    """Makes and joins every group of the table that names `rank`; every rank of the world calls this once, with equal tables.

    Lines that do not name it are walked too, at 12 us each: torch names a group by how many there were before it. With
    `use_local_synchronization`, which names it by its members, torch still counts, and waits forever if one member has joined
    more groups than another, as with ties of stages (1, 2) and (2, 3).

    device: of the tensors that the transports exchange. attaches: whether ranks may use cross-memory attach: those that share
    weights or sequences, and those that sum gradients; only on the host, with gloo. extra: plugins' groups; a rank that is in
    none of the lines of such an axis has a group of one there. backend: of the device's lines; lines marked `gloo` keep it. Two
    lines with the same members and lane share one communicator: all members start the exchanges on them in one order anyway.

    Raises RunError `group-failed` if a member does not join within `timeout`.
    """
    lanes: dict[str, dict[str, dist.ProcessGroup]] = {}
    shared: dict[tuple[tuple[int, ...], str, str], dist.ProcessGroup | None] = {}
    lines = []
    for entry in [*topology.groups(), *extra]:
        is_member = rank in entry.ranks
        if is_member:
            lines.append(entry)
        if len(entry.ranks) == 1:
            continue
        used = "gloo" if entry.backend == "gloo" else backend
        key = (entry.ranks, entry.lane, used)
        if key not in shared:
            shared[key] = make_communicator(entry, rank, used, timeout)
        joined = shared[key]
        assert (joined is not None) == is_member, f"rank {rank} of {entry.label}: {joined}"
        if joined is not None:
            lanes.setdefault(entry.axis, {})[entry.lane] = joined
    control = lanes.get("control", {}).get(DEFAULT_LANE)
    # The ranks of this run share it, and no other run does; there is none without peers.
    store = control.get_group_store() if control is not None and dist.get_backend(control) == "gloo" else None
    progress = Progress(store=store, timeout_s=timeout.total_seconds())
    groups = {}
    for axis, ranks in members_of(lines, extra, rank).items():
        log, own = ExchangeLog(), lanes.get(axis, {})
        transports = message_transports(Members(axis, ranks, rank, progress=progress), own, log, device)
        groups[axis] = Group(axis, ranks, rank, own, transports, log, progress=progress)
    if attaches and topology.world > 1 and is_from_host(backend, device):
        records = common_transports(groups["control"], lanes["control"][DEFAULT_LANE])
        # Connecting is a collective: all ranks take the same axes in the same order, each with its own group.
        for group in (groups[axis] for axis in attaching(topology, extra)):
            if group.size > 1:
                same = Members(group.axis, group.ranks, group.rank, progress=group.progress)
                group.transports.update(connected(same, group.lanes, records, timeout.total_seconds()))
    return Groups(groups, progress)


def members_of(lines: Iterable[GroupEntry], extra: Iterable[GroupEntry], rank: int) -> dict[str, tuple[int, ...]]:
    """Returns the ranks of this rank's group of each axis, alone where no line has it. extra: all of plugins and ties."""
    axes = (*AXES, *(entry.axis for entry in extra if not entry.axis.startswith(TIE)))
    ranks = {entry.axis: entry.ranks for entry in lines}
    return ranks | {axis: (rank,) for axis in axes if axis not in ranks}


def attaching(topology: Topology, extra: Sequence[GroupEntry]) -> tuple[str, ...]:
    """Returns the axes whose exchanges may use cross-memory attach: those over which weights are gathered, those over which an
    entry's gradient may be a partial sum, the one that exchanges slices of sequences, and those of `extra` that ask for it.
    """
    weights = ("wp", "stage", "wdp") if topology.wp > 1 else ("stage",)
    sequences = ("sp",) if topology.sp > 1 else ()
    return (*weights, *sequences, *dict.fromkeys(entry.axis for entry in extra if entry.attaches))


def make_communicator(entry: GroupEntry, rank: int, backend: str, timeout: timedelta) -> dist.ProcessGroup | None:
    """Makes a communicator; returns None on a rank outside of it. All ranks call it. Raises RunError `group-failed`."""
    try:
        with _unbound() if backend == "gloo" else nullcontext():
            group = dist.new_group(list(entry.ranks), backend=backend, timeout=timeout, group_desc=entry.label)
    except RuntimeError as error:
        message = f"the group {entry.label} could not be made on rank {rank}: {first_line(error)}"
        raise RunError("group-failed", message, hint=HINT) from error
    return group if isinstance(group, dist.ProcessGroup) else None


@contextmanager
def _unbound() -> Iterator[None]:
    """Returns a context in which torch makes a group without NCCL. Where the default group is bound to a device, as for NCCL it
    is, torch lets the ranks outside of any new group take part in a split of the default communicator. Those inside split it
    only for a group of NCCL: for another the ones outside would wait for them for ever.
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


class Silent(Alone):
    """Exchanges nothing: every exchange is over when it begins, and results keep what they held."""

    def all_gather(self, wholes: Sequence[Tensor], shards: Sequence[Tensor], *, what: str) -> Work:
        return Done()

    def all_to_all(self, received: Tensor, sent: Tensor, *, what: str, contents: int = 0) -> Work:
        return Done()


class Simulation:
    """Is what a fake world carries, and a real one does not."""

    def groups(
        self, topology: Topology, rank: int, timeout: timedelta, extra: Sequence[GroupEntry] = (), *, attaches: bool
    ) -> Groups:
        """Makes this rank's groups alone, as `make_groups` makes them with peers: no rank counts how many there are."""
        lines = [entry for entry in (*topology.groups(), *extra) if rank in entry.ranks]
        lanes: dict[str, dict[str, dist.ProcessGroup]] = {}
        for entry in lines:
            if len(entry.ranks) > 1:
                joined = make_communicator(entry, rank, "fake", timeout)
                assert joined is not None, entry.label
                lanes.setdefault(entry.axis, {})[entry.lane] = joined
        axes = attaching(topology, extra) if attaches else ()
        progress = Progress(timeout_s=timeout.total_seconds())
        groups = {}
        for axis, ranks in members_of(lines, extra, rank).items():
            members, own = Members(axis, ranks, rank, progress=progress), lanes.get(axis, {})
            transports = self.transports(members, own, attaches=axis in axes)
            imitate = partial(self.imitate, members)
            groups[axis] = Group(axis, ranks, rank, own, transports, progress=progress, imitate=imitate)
        return Groups(groups, progress)

    def transports(self, members: Members, lanes: Mapping[str, dist.ProcessGroup], *, attaches: bool) -> dict[str, Transport]:
        """Returns a transport for each of `lanes`. attaches: whether ranks of one host would read each other's memory."""
        return dict.fromkeys(lanes, Silent())

    def imitate(
        self, members: Members, kind: Exchange, result: Tensor, tensor: Tensor, lane: str, what: str
    ) -> Callable[[], None]:
        """Imitates an exchange of `members` (`Imitate`): nothing comes, and the result keeps what it held."""
        return nothing

    def announced(self, plan: Any, stage: Any, dataset: Any, dtype: torch.dtype) -> Callable[[int, int], Any] | None:
        """Returns what describes the output of a chunk of another stage (stage, chunk), which that would announce; None if no
        steps are taken, or there is one stage only.

        stage: has all layers of the model, on meta and as they were built. dtype: of the parameters.
        """
        return None

    def fill(self, layers: Sequence[Any], dtype: torch.dtype) -> None:
        """Gives this rank's layers, which are on meta and cut, tensors of `dtype` for a step; here it leaves them there."""


def nothing() -> None:
    """Is called where a rank would wait for an exchange that is over."""

"""Stands for what a fake world lacks: peers, and values of tensors.

Groups are those of a run, with torch's backend "fake". Their transports exchange nothing, collectives on them are over when
they begin, and weights on meta get no memory. sley-estimate extends this, to take steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from sley_core.comm.groups import Group, Groups, attaching, make_communicator, members_of
from sley_core.comm.members import Members
from sley_core.comm.progress import Progress
from sley_core.comm.transport.backend import Done
from sley_core.comm.transport.protocol import Transport, Work
from sley_core.comm.verbs import Exchange

if TYPE_CHECKING:
    from sley_core.topology import GroupEntry, Topology


class Silent(Transport):
    """Exchanges nothing: every exchange is over when it begins, and results keep what they held."""

    def all_gather(self, wholes: Sequence[Tensor], shards: Sequence[Tensor], *, what: str) -> Work:
        return Done()

    def reduce_scatter(self, wholes: Sequence[Tensor], scratches: Sequence[Tensor], *, what: str, contents: int = 0) -> Work:
        return Done()

    def all_to_all(self, received: Tensor, sent: Tensor, *, what: str, contents: int = 0) -> Work:
        return Done()

    def all_reduce(self, tensor: Tensor, *, what: str, contents: int = 0) -> Work:
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
        self, members: Members, kind: Exchange, result: Tensor, given: Tensor, lane: str, what: str
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

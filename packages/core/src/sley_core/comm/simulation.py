"""Stands for what a fake world lacks: peers, and values of tensors.

Groups are those of a run, with torch's backend "fake". Their transports exchange nothing, collectives on them are over when
they begin, and weights on meta get no memory. sley-estimate extends this, to take steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from sley_core.comm.groups import Group, Groups, attaching, make_communicator, members_of
from sley_core.comm.members import Members
from sley_core.comm.progress import Progress
from sley_core.comm.transport.choose import installed_transports
from sley_core.comm.transport.silent import nobody_listens, silent_transports, told
from sley_core.comm.verbs import Collective, Exchange, Imitate

if TYPE_CHECKING:
    from sley_core.topology import GroupEntry, Topology

_TOLD: Mapping[Exchange, Collective] = {
    **dict.fromkeys(("sum", "max", "min"), "sum"),
    **dict.fromkeys(("broadcast", "gather"), "gather"),
    "swap": "swap",
}
"""The kind of collective that a listener hears; it hears of messages from the list of actions."""


class Simulation:
    """Is what a fake world carries, and a real one does not."""

    device = torch.device("meta")
    """A device of the kind by which ranks choose how they exchange tensors."""

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
            transports = silent_transports(members, own, self.device, installed_transports() if axis in axes else ())
            groups[axis] = Group(axis, ranks, rank, own, transports, progress=progress, imitate=_silence(members))
        return Groups(groups, progress)

    def announced(self, plan: Any, stage: Any, dataset: Any, dtype: torch.dtype) -> Callable[[int, int], Any] | None:
        """Returns what describes the output of a chunk of another stage (stage, chunk), which that would announce; None if no
        steps are taken, or there is one stage only.

        stage: has all layers of the model, on meta and as they were built. dtype: of the parameters.
        """
        return None

    def fill(self, layers: Sequence[Any], dtype: torch.dtype) -> None:
        """Gives this rank's layers, which are on meta and cut, tensors of `dtype` for a step; here it leaves them there."""


def _silence(members: Members) -> Imitate:
    """Returns what imitates collectives of `members`: nothing comes, and results keep what they held."""

    def imitate(kind: Exchange, result: Tensor, given: Tensor, lane: str, what: str) -> Callable[[], None]:
        return told(members, _TOLD[kind], lane, result.nbytes) if kind in _TOLD else nobody_listens

    return imitate

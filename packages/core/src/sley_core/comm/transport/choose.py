"""Chooses the transports of a group, once, when groups are made: by what its lanes are, and where its tensors and ranks lie."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from sley_core.comm.exchange_log import ExchangeLog
from sley_core.comm.guard import guarded, turn_of
from sley_core.comm.members import Members
from sley_core.comm.transport.backend import Backend, can_coalesce
from sley_core.comm.transport.cma.connection import Connection
from sley_core.comm.transport.cma.rows import scratch
from sley_core.comm.transport.cma.transport import RINGS, Cma
from sley_core.comm.transport.direct import Direct
from sley_core.comm.transport.protocol import Transport
from sley_core.comm.transport.silent import Silent


def is_from_host(backend: str, device: torch.device) -> bool:
    """Returns whether ranks exchange tensors on `device` themselves, from the host's memory, and not by `backend`'s own
    collectives: by messages of gloo, or by reading one another's memory.
    """
    return backend == "gloo" and device.type == "cpu"


def message_transports(
    members: Members, lanes: Mapping[str, dist.ProcessGroup], log: ExchangeLog, device: torch.device
) -> dict[str, Transport]:
    """Returns a transport by messages, or by the backend's own collectives, for each of `lanes`, for tensors on `device`.

    log: notes what the backend's collectives exchange, which carry no mark; ranks compare it before a step ends.
    """
    found: dict[str, Transport] = {}
    for name, lane in lanes.items():
        if is_from_host(dist.get_backend(lane), device):
            found[name] = Direct(members, name, lane)
        else:
            found[name] = Backend(members, name, lane, log, is_coalesced=can_coalesce(lane))
    return found


def attached(members: Members, lanes: Mapping[str, dist.ProcessGroup], timeout_s: float) -> dict[str, Transport]:
    """Connects `members` by cross-memory attach; returns a transport by it for each of `lanes`, or {} on all ranks, where one
    cannot read a peer's memory. For tensors on the host. All members call it.

    timeout_s: of every wait.
    """

    def connect() -> Connection | None:
        """Connects this rank to the others; None on all of them if any two cannot read each other."""
        # The first lane's members, in the order of the table of groups.
        return Connection.open(members, RINGS * len(lanes), next(iter(lanes.values())), timeout_s)

    connection = guarded(connect, turn_of("opening", members, "cross-memory attach"))
    return {name: Cma(connection, name, at) for at, name in enumerate(lanes)} if connection is not None else {}


def silent_transports(
    members: Members, lanes: Mapping[str, dist.ProcessGroup], device: torch.device, *, attaches: bool
) -> dict[str, Transport]:
    """Returns transports that exchange nothing for `lanes` of a fake world; they take memory as those of a real one on `device`
    do.

    attaches: whether that would use cross-memory attach, as it does where all its ranks are on one host.
    """
    if device.type != "cpu":
        return {name: Silent(members, name) for name in lanes}
    if attaches:
        return {name: Silent(members, name, scratch=scratch) for name in lanes}
    return {name: Silent(members, name, Direct(members, name, lane).num_scratch_rows) for name, lane in lanes.items()}

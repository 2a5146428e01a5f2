"""Chooses the transports of a group, once, when groups are made: by what its lanes are, and where its tensors and ranks lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib.metadata import entry_points

import torch
import torch.distributed as dist

from sley_core.comm.guard import guarded, turn_of
from sley_core.comm.marks import ExchangeLog
from sley_core.comm.members import Members
from sley_core.comm.texts import gather_values
from sley_core.comm.transport.backend import Backend, Direct, can_coalesce
from sley_core.comm.transport.protocol import Transport
from sley_core.errors import PluginError
from sley_core.records import TransportRecord

GROUP = "sley.transports"


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


@cache
def installed_transports() -> tuple[TransportRecord, ...]:
    """Returns the transports between CPU ranks that installed packages bring, sorted by name.

    Raises PluginError "transport-import" for one that cannot be imported.
    """
    records = []
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        try:
            records.append(point.load())
        except Exception as error:
            message = f"the transport `{point.name}` ({point.value}) cannot be imported: {type(error).__name__}: {error}"
            raise PluginError("transport-import", message, hint="reinstall its package, or uninstall it") from error
    return tuple(records)


def common_transports(everyone: Members, lane: dist.ProcessGroup) -> tuple[TransportRecord, ...]:
    """Returns the installed transports that every rank of the world has; a collective of `everyone` over `lane`.

    A host may lack a package that another has, and connecting is a collective.
    """
    mine = installed_transports()
    gather = partial(gather_values, [record.name for record in mine], lane)
    theirs = [set(names) for names in guarded(gather, turn_of("comparing", everyone, "installed transports"))]
    return tuple(record for record in mine if all(record.name in names for names in theirs))


def connected(
    members: Members, lanes: Mapping[str, dist.ProcessGroup], records: Sequence[TransportRecord], timeout_s: float
) -> dict[str, Transport]:
    """Connects `members` by the first of `records` that can, for tensors on the host; returns a transport for each of `lanes`,
    or {} on all ranks. All members call it, with equal records.

    timeout_s: of every wait.
    """
    for record in records:
        connect = partial(record.load(record.connect), members, lanes, timeout_s)
        found: dict[str, Transport] = guarded(connect, turn_of("opening", members, record.name))
        if found:
            return found
    return {}

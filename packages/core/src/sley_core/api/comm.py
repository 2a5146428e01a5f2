"""Gives plugins groups of ranks, the device, and collectives over them."""

from sley_core.comm.collectives import (
    Pending,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather_objects,
    receive_from,
    send_to,
)
from sley_core.comm.copies import CopyEvent, CopyStream, HostMemory
from sley_core.comm.device import Device
from sley_core.comm.folder_probe import probe
from sley_core.comm.groups import Group, Groups
from sley_core.comm.guard import Turn
from sley_core.comm.marks import Mark, checksum
from sley_core.comm.progress import Members, SentBytes
from sley_core.comm.startup import gather_values
from sley_core.comm.transport import Published, Transport, Work

__all__ = [
    "CopyEvent",
    "CopyStream",
    "Device",
    "Group",
    "Groups",
    "HostMemory",
    "Mark",
    "Members",
    "Pending",
    "Published",
    "SentBytes",
    "Transport",
    "Turn",
    "Work",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "checksum",
    "gather_objects",
    "gather_values",
    "probe",
    "receive_from",
    "send_to",
]

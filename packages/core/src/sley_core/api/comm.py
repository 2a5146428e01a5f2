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
from sley_core.comm.groups import Group, Groups
from sley_core.comm.marks import checksum
from sley_core.comm.sent_bytes import SentBytes
from sley_core.comm.transport.protocol import Published, Transport, Work
from sley_core.topology import GATHER, REDUCE

__all__ = [
    "GATHER",
    "REDUCE",
    "CopyEvent",
    "CopyStream",
    "Device",
    "Group",
    "Groups",
    "HostMemory",
    "Pending",
    "Published",
    "SentBytes",
    "Transport",
    "Work",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "checksum",
    "gather_objects",
    "receive_from",
    "send_to",
]

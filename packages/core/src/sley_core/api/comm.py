"""Gives plugins groups of ranks, the device, and collectives over them."""

from sley_core.comm.collectives import Pending, all_gather, all_reduce, all_to_all, broadcast, receive_from, send_to
from sley_core.comm.device import Device
from sley_core.comm.groups import Group, Groups
from sley_core.comm.host_rows import HostShare
from sley_core.comm.host_sum import HostSum, SumMemory
from sley_core.comm.marks import checksum
from sley_core.comm.rows import (
    GATHER,
    REDUCE,
    Exchange,
    Reduction,
    gather_rows,
    num_received,
    reduce_rows,
    share_rows,
    swap_rows,
)

__all__ = [
    "GATHER",
    "REDUCE",
    "Device",
    "Exchange",
    "Group",
    "Groups",
    "HostShare",
    "HostSum",
    "Pending",
    "Reduction",
    "SumMemory",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "checksum",
    "gather_rows",
    "num_received",
    "receive_from",
    "reduce_rows",
    "send_to",
    "share_rows",
    "swap_rows",
]

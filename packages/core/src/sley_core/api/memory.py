"""Gives offload managers, pools and activation policies what a run holds, and the means to move it."""

from sley_core.comm.copies import CopyEvent, CopyStream, HostMemory, free, grow, is_host_memory, make_room, storage_id
from sley_core.engine.weights import Stepped
from sley_core.memory.inventory import MemoryInventory, StorageEntry
from sley_core.memory.pool import DevicePool
from sley_core.memory.state import PARTS, Moved, OffloadManager, Part, Where, is_away
from sley_core.model.tensors import is_plain, sum_of_bits, version_of

__all__ = [
    "PARTS",
    "CopyEvent",
    "CopyStream",
    "DevicePool",
    "HostMemory",
    "MemoryInventory",
    "Moved",
    "OffloadManager",
    "Part",
    "Stepped",
    "StorageEntry",
    "Where",
    "free",
    "grow",
    "is_away",
    "is_host_memory",
    "is_plain",
    "make_room",
    "storage_id",
    "sum_of_bits",
    "version_of",
]

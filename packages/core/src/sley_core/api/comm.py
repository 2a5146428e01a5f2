"""Groups of ranks, the device, and collectives."""

from sley_core.comm.device import CopyEvent, CopyStream, Device, HostMemory
from sley_core.comm.group import Group
from sley_core.comm.progress import Members, SentBytes, Turn
from sley_core.comm.transport import Mark, Published, Transport, Work, checksum, gather_values
from sley_core.weight_files.write import probe

__all__ = ["CopyEvent", "CopyStream", "Device", "Group", "HostMemory", "Mark", "Members", "Published", "SentBytes"]
__all__ += ["Transport", "Turn", "Work", "checksum", "gather_values", "probe"]

"""Groups of ranks, the device, and collectives."""

from sley_core.comm.device import CopyEvent, CopyStream, Device, HostMemory
from sley_core.comm.exchanges import Mark, Members, SentBytes, Turn, checksum
from sley_core.comm.transport import Published, Transport, Work, gather_values
from sley_core.comm.world import Group
from sley_core.weight_files.write import probe

__all__ = ["CopyEvent", "CopyStream", "Device", "Group", "HostMemory", "Mark", "Members", "Published", "SentBytes"]
__all__ += ["Transport", "Turn", "Work", "checksum", "gather_values", "probe"]

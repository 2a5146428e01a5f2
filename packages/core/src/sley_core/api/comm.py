"""Groups of ranks, the device, and collectives."""

from sley_core.comm.copies import CopyEvent as CopyEvent
from sley_core.comm.copies import CopyStream as CopyStream
from sley_core.comm.copies import HostMemory as HostMemory
from sley_core.comm.device import Device as Device
from sley_core.comm.folder_probe import probe as probe
from sley_core.comm.group import Group as Group
from sley_core.comm.guard import Turn as Turn
from sley_core.comm.marks import Mark as Mark
from sley_core.comm.marks import checksum as checksum
from sley_core.comm.progress import Members as Members
from sley_core.comm.progress import SentBytes as SentBytes
from sley_core.comm.startup import gather_values as gather_values
from sley_core.comm.transport import Published as Published
from sley_core.comm.transport import Transport as Transport
from sley_core.comm.transport import Work as Work

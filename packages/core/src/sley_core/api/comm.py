"""Groups of ranks, the device, and collectives."""

from sley_core.comm.device import CopyEvent as CopyEvent
from sley_core.comm.device import CopyStream as CopyStream
from sley_core.comm.device import Device as Device
from sley_core.comm.device import HostMemory as HostMemory
from sley_core.comm.group import Group as Group
from sley_core.comm.progress import Members as Members
from sley_core.comm.progress import SentBytes as SentBytes
from sley_core.comm.progress import Turn as Turn
from sley_core.comm.transport import Mark as Mark
from sley_core.comm.transport import Published as Published
from sley_core.comm.transport import Transport as Transport
from sley_core.comm.transport import Work as Work
from sley_core.comm.transport import checksum as checksum
from sley_core.comm.transport import gather_values as gather_values
from sley_core.weight_files.write import probe as probe

"""Gives plugins groups of ranks, the device, and collectives over them."""

from sley_core.comm.collectives import Pending as Pending
from sley_core.comm.collectives import all_gather as all_gather
from sley_core.comm.collectives import all_reduce as all_reduce
from sley_core.comm.collectives import all_to_all as all_to_all
from sley_core.comm.collectives import broadcast as broadcast
from sley_core.comm.collectives import gather_objects as gather_objects
from sley_core.comm.collectives import receive_from as receive_from
from sley_core.comm.collectives import send_to as send_to
from sley_core.comm.copies import CopyEvent as CopyEvent
from sley_core.comm.copies import CopyStream as CopyStream
from sley_core.comm.copies import HostMemory as HostMemory
from sley_core.comm.device import Device as Device
from sley_core.comm.folder_probe import probe as probe
from sley_core.comm.groups import Group as Group
from sley_core.comm.groups import Groups as Groups
from sley_core.comm.guard import Turn as Turn
from sley_core.comm.marks import Mark as Mark
from sley_core.comm.marks import checksum as checksum
from sley_core.comm.progress import Members as Members
from sley_core.comm.progress import SentBytes as SentBytes
from sley_core.comm.startup import gather_values as gather_values
from sley_core.comm.transport import Published as Published
from sley_core.comm.transport import Transport as Transport
from sley_core.comm.transport import Work as Work

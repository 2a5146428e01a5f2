"""The memory of a run for offload managers, pools and activation policies."""

from sley_core.comm.device import storage_id as storage_id
from sley_core.engine.weights import Stepped as Stepped
from sley_core.memory.inventory import MemoryInventory as MemoryInventory
from sley_core.memory.inventory import Moved as Moved
from sley_core.memory.inventory import OffloadManager as OffloadManager
from sley_core.memory.inventory import Part as Part
from sley_core.memory.inventory import StorageEntry as StorageEntry
from sley_core.memory.inventory import Where as Where
from sley_core.memory.pool import DevicePool as DevicePool
from sley_core.model.tensors import fingerprint as fingerprint
from sley_core.model.tensors import is_plain as is_plain
from sley_core.model.tensors import sum_of_bits as sum_of_bits
from sley_core.model.tensors import version_of as version_of

"""The memory of a run for offload managers, pools and activation policies."""

<<<<<<< HEAD
from sley_core.comm.device import storage_id
from sley_core.engine.weights import Stepped
from sley_core.memory.inventory import MemoryInventory, Moved, OffloadManager, Part, StorageEntry, Where
from sley_core.memory.inventory import DevicePool
from sley_core.model.tensors import fingerprint, is_plain, sum_of_bits, version_of

__all__ = ["DevicePool", "MemoryInventory", "Moved", "OffloadManager", "Part", "Stepped", "StorageEntry", "Where"]
__all__ += ["fingerprint", "is_plain", "storage_id", "sum_of_bits", "version_of"]
=======
from sley_core.comm.device import storage_id as storage_id
from sley_core.engine.weights import Stepped as Stepped
from sley_core.memory.inventory import DevicePool as DevicePool
from sley_core.memory.inventory import MemoryInventory as MemoryInventory
from sley_core.memory.inventory import Moved as Moved
from sley_core.memory.inventory import OffloadManager as OffloadManager
from sley_core.memory.inventory import Part as Part
from sley_core.memory.inventory import StorageEntry as StorageEntry
from sley_core.memory.inventory import Where as Where
from sley_core.model.tensors import fingerprint as fingerprint
from sley_core.model.tensors import is_plain as is_plain
from sley_core.model.tensors import sum_of_bits as sum_of_bits
from sley_core.model.tensors import version_of as version_of
>>>>>>> 1b91d2fc (memory: the pool joins the list of a run's memory; transfer costs are reported as they are counted)

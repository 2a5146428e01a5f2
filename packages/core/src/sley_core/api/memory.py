"""For offload managers, pools and activation policies: the memory of a run."""

from sley_core.comm.device import storage_id
from sley_core.engine.weights import OptimizerParam
from sley_core.memory import DevicePool, MemoryInventory, Moved, OffloadManager, Part, StorageEntry, Where
from sley_core.model.tensors import is_plain, sum_of_bits, version_of

__all__ = ["DevicePool", "MemoryInventory", "Moved", "OffloadManager", "OptimizerParam", "Part", "StorageEntry", "Where"]
__all__ += ["is_plain", "storage_id", "sum_of_bits", "version_of"]

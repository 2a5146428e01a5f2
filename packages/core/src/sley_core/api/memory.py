"""Gives offload managers, pools and activation policies what a run holds, and the means to move it."""

from sley_core.comm.copies import CopyEvent, CopyStream, HostMemory, free, grow
from sley_core.engine.masters import Stepped
from sley_core.engine.step_events import StepEvents
from sley_core.memory.holdings import Holding, Holdings, storage_id
from sley_core.memory.protocols import Holds, OffloadManager, Trims
from sley_core.memory.state import PARTS, Moved, Part, StateError, Where, is_away

__all__ = [
    "PARTS",
    "CopyEvent",
    "CopyStream",
    "Holding",
    "Holdings",
    "Holds",
    "HostMemory",
    "Moved",
    "OffloadManager",
    "Part",
    "StateError",
    "StepEvents",
    "Stepped",
    "Trims",
    "Where",
    "free",
    "grow",
    "is_away",
    "storage_id",
]

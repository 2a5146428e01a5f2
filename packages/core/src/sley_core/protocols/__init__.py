"""The interfaces of a run's live objects. Hooks assemble the objects once; the step loop calls their methods directly.

Plugins write classes with these methods; a class that inherits from a protocol gets its empty methods as defaults.
"""

from sley_core.comm.verbs import Collective
from sley_core.protocols.exchanges import MemoryPool, SequenceCommunicator, StageLink, WeightCommunicator
from sley_core.protocols.records import Checkpointer, CheckpointFiles, Counts, Keeps, MetricsWriter, Restored, Rewinds
from sley_core.protocols.training import ActivationPolicy, GradientHandler, Loss, SchedulerHook, SplitLogits

__all__ = [
    "ActivationPolicy",
    "CheckpointFiles",
    "Checkpointer",
    "Collective",
    "Counts",
    "GradientHandler",
    "Keeps",
    "Loss",
    "MemoryPool",
    "MetricsWriter",
    "Restored",
    "Rewinds",
    "SchedulerHook",
    "SequenceCommunicator",
    "SplitLogits",
    "StageLink",
    "WeightCommunicator",
]

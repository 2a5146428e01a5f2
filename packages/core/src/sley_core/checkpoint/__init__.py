"""Checkpoints of a run: written by all ranks, read by any number of ranks, and verified."""

from sley_core.checkpoint.reader import Checkpoint, read
from sley_core.checkpoint.verify import Damage, Newest, newest, verify

__all__ = ["Checkpoint", "Damage", "Newest", "newest", "read", "verify"]

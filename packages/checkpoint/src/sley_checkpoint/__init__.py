"""Checkpoints of a run: written by all ranks, read by any number of ranks, and verified."""

from sley_checkpoint.reader import Checkpoint, Damage, Newest, newest, read, verify

__all__ = ["Checkpoint", "Damage", "Newest", "newest", "read", "verify"]

"""Writes the checkpoints of a run on all ranks. Any number of ranks can read and verify a checkpoint (`reader`)."""

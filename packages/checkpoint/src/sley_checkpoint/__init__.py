"""Checkpoints of a run: all ranks write them, and any number of ranks can read and verify them (`reader`)."""

"""Checkpoints of a run: written by all ranks, read by any number of ranks (`reader`), and verified."""

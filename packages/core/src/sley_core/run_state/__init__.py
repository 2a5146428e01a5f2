"""The state of a run from step to step: collected for a checkpointer, and restored from a checkpoint of any layout."""

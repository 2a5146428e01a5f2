"""What a run keeps from step to step: collected for a checkpointer, and restored from what it has saved, in any layout."""

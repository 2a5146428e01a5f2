"""Explains from the records of a run's ranks why the run failed, or which rank slows it down."""

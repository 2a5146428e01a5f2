"""Moves parts of a run's memory to the host and back."""

"""Estimates the memory of a run by running its own steps on tensors without values."""

"""Estimates the bytes of a run from its own steps on tensors without values."""

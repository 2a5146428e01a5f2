"""Writes down steps that are taken on tensors without values: what was computed and exchanged, what waited for what."""

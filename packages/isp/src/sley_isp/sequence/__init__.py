"""Attention over sequences of which every rank has a slice: slices of all heads become whole sequences of a few."""

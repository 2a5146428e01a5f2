"""Weights of a run in the forms that other programs read."""

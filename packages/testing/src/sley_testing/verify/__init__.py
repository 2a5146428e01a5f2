"""Implements `train-cli verify`, which compares a plan's layout with one process of the same plan."""

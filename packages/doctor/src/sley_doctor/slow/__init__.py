"""Finds the slow rank of a run, with the layer or action, from the records of its ranks. Imports no torch.

All ranks show the same seconds per step, so waiting names nobody: the slow rank is the one that works longer than ranks with
the same layers. A slowdown counts from a quarter of a step; less would raise false alarms on any busy machine.
"""

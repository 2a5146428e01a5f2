"""Finds the slow rank of a run, with the layer or action, from the records of its ranks. Imports no torch.

All ranks have the same step time, so waits do not show the slow rank: it is the rank that works longer than ranks with the same
layers. A slowdown of less than a quarter of a step is ignored; it would raise false alarms on any busy machine.
"""

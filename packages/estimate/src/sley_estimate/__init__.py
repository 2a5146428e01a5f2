"""Estimates the memory and the step time of a run before it starts, and searches for its fastest layout."""

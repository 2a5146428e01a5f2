"""Finds the cause of a failure in what the ranks of a run have left: pure functions, without torch."""

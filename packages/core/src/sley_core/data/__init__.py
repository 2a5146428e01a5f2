"""Datasets, the order of their samples, and the feed, which reads each rank's rows of a global batch."""

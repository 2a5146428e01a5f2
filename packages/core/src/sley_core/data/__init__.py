"""Data: datasets, the order of their samples, and the feed that hands each rank its rows of a global batch."""

"""The metrics of a run: rows, throughput and memory."""

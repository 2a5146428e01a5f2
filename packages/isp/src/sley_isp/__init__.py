"""Sharded weights, gathered just before use, and split sequences for Sley: plugin `isp`."""

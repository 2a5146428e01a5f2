"""Reads, locates, resolves, checks and writes plans."""

"""Measures a machine: its device, its links, and the layers of a plan."""

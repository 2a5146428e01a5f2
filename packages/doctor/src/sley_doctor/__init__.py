"""Explains why a run of Sley failed, and which rank is slow, from the records of its ranks."""

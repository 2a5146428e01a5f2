"""Folders on a disk or behind a URL, and whether all ranks see one."""

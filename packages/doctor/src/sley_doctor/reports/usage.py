"""Reads the kernel's counters of this process: time, page faults, context switches. Zeros on systems that do not have them."""

from __future__ import annotations

from sley_doctor.reports.work_record import Usage

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


def used() -> Usage:
    """Returns what this process has used since its start, over all its threads."""
    if resource is None:
        return Usage(0.0, 0.0, 0, 0, 0)
    found = resource.getrusage(resource.RUSAGE_SELF)
    return Usage(found.ru_utime, found.ru_stime, found.ru_minflt, found.ru_majflt, found.ru_nivcsw)

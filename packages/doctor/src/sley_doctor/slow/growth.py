"""Finds ranks whose memory grows with every step, on the host (not shared with other processes) or on the device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from sley_doctor.reports.work_record import WorkRecord

LEAST_MB, LEAST_SHARE = 64.0, 0.15
"""Less than this, or than this share of what there was, may be caches that fill."""

LEAST_WINDOWS = 5
STEADY = 0.8
"""The share of windows in which it must grow."""


class Growth(NamedTuple):
    """Memory that a rank holds at step `last` beyond what it held at step `first`. where: "host" or "device"."""

    rank: int
    where: str
    megabytes: float
    first: int
    last: int


def growths(records: Sequence[WorkRecord]) -> list[Growth]:
    """Returns the ranks whose memory grows, the most first; the first window, in which a run settles, is left out."""
    found = [one for record in records for where in ("host", "device") if (one := _growth(record, where))]
    return sorted(found, key=lambda one: -one.megabytes)


def _growth(record: WorkRecord, where: str) -> Growth | None:
    """Returns the growth of a rank's memory if it is large and steady until the end; else None. where: "host" or "device"."""
    windows = record.windows[1:]
    if len(windows) < LEAST_WINDOWS:
        return None
    held = [window.private_mb if where == "host" else window.device_mb for window in windows]
    total = held[-1] - held[0]
    rising = sum(after > before for before, after in pairwise(held)) / (len(held) - 1)
    # What has filled by now no longer grows. By steps: windows of a long run have more of them the older they are.
    since = windows[-1].last - (windows[-1].last - windows[0].last) / 3
    before = [mb for mb, one in zip(held, windows, strict=True) if one.last <= since]
    lately = held[-1] - (before[-1] if before else held[0])
    is_growing = total >= max(LEAST_MB, LEAST_SHARE * held[0]) and rising >= STEADY and lately >= total / 6
    return Growth(record.start.rank, where, total, windows[0].last, windows[-1].last) if is_growing else None

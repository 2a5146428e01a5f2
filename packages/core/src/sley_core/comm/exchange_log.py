"""Logs exchanges that carry no mark: a checksum per group, which its ranks compare before the results are used.

A backend's own collectives have no place for a mark, so ranks that exchange different things there get wrong numbers. Every
rank keeps the marks of a step in one checksum per lane; the sum that ends the step shows whether all have the same, and if not
no weight is changed (`compare`).
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

from sley_core.comm.marks import Mark


class Exchanged(NamedTuple):
    """Summarises a rank's exchanges with `ranks`: how many, the checksum of all, and the last one in words."""

    ranks: tuple[int, ...]
    times: int
    number: int
    last: str


class ExchangeLog:
    """Logs the exchanges of one group since the last `clear`, in their order on each lane; lanes are independent."""

    def __init__(self) -> None:
        self._lanes: dict[str, int] = {}
        self._count = 0
        self._last = ""

    def add(self, lane: str, mark: Mark) -> None:
        """Records that the exchange of `mark` starts on `lane`."""
        self._lanes[lane] = zlib.crc32(mark.number.to_bytes(4, "little"), self._lanes.get(lane, 0))
        self._count += 1
        self._last = mark.what

    def clear(self) -> None:
        """Discards the log, when a step or an evaluation begins."""
        self._lanes.clear()
        self._count = 0
        self._last = ""

    def exchanged(self, ranks: tuple[int, ...]) -> Exchanged | None:
        """Returns a summary of the log; None if it is empty. ranks: the group's, copied into it."""
        if not self._count:
            return None
        number = 0
        for lane, value in sorted(self._lanes.items()):
            number = zlib.crc32(f"{lane} {value}".encode(), number)
        return Exchanged(ranks, self._count, number, self._last)

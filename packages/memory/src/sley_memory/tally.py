"""Counts for `memory.host`: bytes, copies, seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sley_memory.host_buffers import HostBuffers


class HostTally:
    """Counts bytes and copies since the beginning, and the seconds that the host took for them."""

    def __init__(self) -> None:
        self._total: dict[str, float] = {}

    def out(self, num_bytes: int, seconds: float) -> None:
        """Counts a storage of `num_bytes` that goes to the host, and the host's seconds to start its copy."""
        self._add(moved_bytes=num_bytes, moved_storages=1, copy_out_host_s=seconds)

    def back(self, num_bytes: int, seconds: float) -> None:
        """Counts a storage of `num_bytes` that comes back, and the host's seconds to start its copy."""
        self._add(fetched_bytes=num_bytes, copy_back_host_s=seconds)

    def waited(self) -> None:
        """Counts a storage that was not on its way when it was needed."""
        self._add(fetched_on_demand=1)

    def over_budget(self, num_bytes: int) -> None:
        """Counts a storage that stayed because the budget was used up."""
        self._add(over_budget_bytes=num_bytes)

    def counts(self, buffers: HostBuffers) -> Mapping[str, float]:
        """Returns the numbers since the beginning, by name; and of the host's buffers the most bytes lent, their bytes and how
        many were allocated.
        """
        names = ("moved_bytes", "moved_storages", "fetched_bytes", "fetched_on_demand", "over_budget_bytes")
        return {
            **{name: self._total.get(name, 0) for name in (*names, "copy_out_host_s", "copy_back_host_s")},
            "max_away_bytes": buffers.max_lent_bytes,
            "host_bytes": buffers.num_bytes,
            "host_allocations": buffers.num_allocations,
        }

    def _add(self, **more: float) -> None:
        for name, value in more.items():
            self._total[name] = self._total.get(name, 0) + value

"""Combines several exchanges into one handle."""

from __future__ import annotations

from collections.abc import Sequence

from sley_core.api.comm import Work


class Together(Work):
    """Is the handle of the exchanges `works`, in the order in which they started."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def test(self) -> bool:
        """Returns whether all are complete; advances each."""
        are_over = [work.test() for work in self._works]
        return all(are_over)

    def wait(self) -> None:
        """Blocks until all results are complete."""
        for work in self._works:
            work.wait()

    def release(self) -> None:
        """Releases all results."""
        for work in self._works:
            work.release()

    def wait_sent(self) -> None:
        """Blocks until the peers have everything that this rank sent."""
        for work in self._works:
            work.wait_sent()

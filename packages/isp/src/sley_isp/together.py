"""Several exchanges as one."""

from __future__ import annotations

from collections.abc import Sequence

from sley_core.api.comm import Work


class Together(Work):
    """The exchanges `works`, which began in their order."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def test(self) -> bool:
        """Returns whether all are over; moves each on."""
        are_over = [work.test() for work in self._works]
        return all(are_over)

    def wait(self) -> None:
        """Returns when all results are complete."""
        for work in self._works:
            work.wait()

    def release(self) -> None:
        """Gives up all results."""
        for work in self._works:
            work.release()

    def wait_sent(self) -> None:
        """Returns when the peers have all that this rank gave."""
        for work in self._works:
            work.wait_sent()

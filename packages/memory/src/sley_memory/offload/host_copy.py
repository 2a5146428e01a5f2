"""Says whether a piece of device memory is worth comparing with its copy on the host, and whether it differs."""

from __future__ import annotations

from torch import Tensor

MOST_RESTS = 15
"""Offloads in a row in which memory that used to change is copied without checking its words."""


class HostCopy:
    """Records where one piece lies on the host, and what is known of the piece since it was copied there.

    seen: versions when it came back; None before that. step: the number of steps that had begun then. print: the fingerprint of
    the host copy; None if it was not computed.
    """

    def __init__(self, host: Tensor) -> None:
        self.host = host
        self.seen: tuple[int, ...] | None = None
        self.step: int | None = None
        self.print: int | None = None
        self._num_rests = 0
        self._rests_left = 0

    def forget(self) -> None:
        """Forgets what is known of the piece: the host may have something else."""
        self.seen = self.print = None

    def is_worth_a_look(self, now: tuple[int, ...], step: int | None) -> bool:
        """Returns whether to compare the piece's words: its versions are `now` those seen, and words that had changed all
        the same (fused optimizers count up no version) did so some time ago, or no `step` has begun since; or nothing is known
        of it.
        """
        if self.seen is None:
            return True
        if self.seen != now:
            self._rests_left = 0
            return False
        if step is not None and step == self.step:
            return True
        self._rests_left -= 1
        return self._rests_left < 0

    def has_changed(self, found: int) -> bool:
        """Returns whether the piece, whose fingerprint is `found`, differs from what the host has, or nothing is known of that.
        Keeps the fingerprint, since the piece is copied then, and how long not to compare again.
        """
        before, self.print = self.print, found
        if before is None:
            return True
        self._num_rests = 0 if before == found else min(2 * self._num_rests + 1, MOST_RESTS)
        self._rests_left = self._num_rests
        return before != found

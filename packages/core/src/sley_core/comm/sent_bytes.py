"""Counts the bytes that a rank sends in a step, in one way for everything that exchanges, so that plans can be compared."""

from __future__ import annotations

from torch import Tensor

from sley_core.comm.members import Members


class SentBytes:
    """Counts the bytes that this rank sends in a step: for a collective, the fewest with which a group of its size can do it.

             begin_step ──> add* ──> end_step ──> begin_step ...
                  ^            │
                  └────────────┘  a step that failed

    The backend's actual algorithm, and what it sends besides the tensors, are not counted.
    """

    def __init__(self) -> None:
        self._now = 0
        self._last = 0

    def begin_step(self) -> None:
        """Starts to count a step, and discards the count of one that did not end."""
        self._now = 0

    def add(self, whole: Tensor, group: Members, *, passes: int) -> None:
        """Counts an exchange of `whole`, the full tensor, over `group`: in each pass a rank sends all of it but its own part.

        passes: 1 for an all-gather, a reduce-scatter or an all-to-all, 2 for an all-reduce.
        """
        self._now += whole.nbytes * (group.size - 1) * passes // group.size

    def add_message(self, num_bytes: int) -> None:
        """Counts a message to one peer."""
        self._now += num_bytes

    def end_step(self) -> None:
        """Ends the step, whose count `counts` then returns."""
        self._last = self._now

    def counts(self) -> dict[str, float]:
        """Returns the bytes of the last step that ended, as `sent_bytes_per_step`, for `protocols.Counts`."""
        return {"sent_bytes_per_step": self._last}

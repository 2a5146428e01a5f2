"""Counts the exchanges that this rank has started, so that ranks can say after a failure which of them came to what."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.distributed import Store  # type: ignore[attr-defined]  # torch exports it

SHARE_OF_LIMIT, MOST_S = 1 / 8, 5.0
"""For how long a rank that has waited in vain waits for what the others say: a share of the limit of its waits, and seconds."""


@dataclass
class Progress:
    """Of one rank in one run; all its groups share it.

    A queue is what the members of a group start in one order: the exchanges of one lane, or the messages from one rank to
    another. numbers: how many exchanges of each queue this rank has started. store: in which ranks tell each other; None until
    there is one. timeout_s: the limit of waits.
    """

    numbers: dict[str, int] = field(default_factory=dict)
    store: Store | None = None
    timeout_s: float = 0.0

    @property
    def patience_s(self) -> float:
        """How long to wait for the others' words after a wait has run out of time."""
        return min(SHARE_OF_LIMIT * self.timeout_s, MOST_S)

"""GPipe: all forwards, then all backwards (arXiv 1811.06965).

    stage 0  F0-F1-F2-F3-...........................B0====B1====B2====B3====
    stage 1  ...F0-F1-F2-F3-..................B0====B1====B2====B3====......
    stage 2  ......F0-F1-F2-F3-.........B0====B1====B2====B3====............
    stage 3  .........F0-F1-F2-F3-B0====B1====B2====B3====..................

The simplest schedule, and the one with the most in flight: every micro-batch of the step at once.
"""

from __future__ import annotations

from sley_core.api.actions import Action
from sley_pp.schedules.words import B, F, numbered, wrong_chunks


def gpipe(stages: int, chunks: int, micros: int) -> list[list[Action]]:
    """Returns the same list for each stage. One chunk per stage; any number of micro-batches, all in flight at once."""
    if chunks != 1:
        raise wrong_chunks("pp.gpipe", "one chunk", chunks, "use `pp.interleaved` for several")
    return [numbered([F] * micros + [B] * micros) for _ in range(stages)]

"""1F1B: one forward, one backward, so that a stage never holds more micro-batches than there are stages (arXiv 2006.09503).

    stage 0  F0-F1-F2-F3-..................B0====...B1====...B2====...B3====
    stage 1  ...F0-F1-F2-............B0====F3-B1====...B2====...B3====......
    stage 2  ......F0-F1-......B0====F2-B1====F3-B2====...B3====............
    stage 3  .........F0-B0====F1-B1====F2-B2====F3-B3====..................

As long as GPipe, with P - s micro-batches held on stage s of P instead of all.
"""

from __future__ import annotations

from sley_core.api.actions import Action
from sley_pp.schedules.words import B, F, numbered, wrong_chunks


def one_f_one_b(stages: int, chunks: int, micros: int) -> list[list[Action]]:
    """Returns one list per stage, for one chunk each and any number of micro-batches. Stage s holds min(P - s, M) pairs."""
    if chunks != 1:
        raise wrong_chunks("pp.one_f_one_b", "one chunk", chunks, "use `pp.interleaved` for several")
    lists = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, micros)
        lists.append(numbered([F] * ahead + [F, B] * (micros - ahead) + [B] * ahead))
    return lists

"""ZB-H1: 1F1B with its backward split, a third of the bubble in the same memory (arXiv 2401.10241, section 2.1).

    stage 0  F0-F1-F2-F3-.........D0=W0~D1=W1~D2=W2~D3=W3~
    stage 1  ...F0-F1-F2-......D0=F3-D1=W0~D2=W1~D3=W2~W3~
    stage 2  ......F0-F1-...D0=F2-D1=F3-D2=W0~D3=W1~W2~W3~
    stage 3  .........F0-D0=F1-D1=F2-D2=F3-D3=W0~W1~W2~W3~

The gradient that the previous stage waits for is ready after D; later stages defer their W until they hold P micro-batches,
as many as stage 0 holds in 1F1B. The bubble is (P - 1)(F + D - W), as long as W takes no longer than F or D.
"""

from __future__ import annotations

from sley_core.api.actions import Action, loop
from sley_pp.schedules.weight_gradients import with_weight_gradients
from sley_pp.schedules.words import D, F, numbered, wrong_chunks


def zero_bubble_h1(stages: int, chunks: int, micros: int) -> list[list[Action]]:
    """Returns one list per stage, for one chunk each and any number of micro-batches. Every stage holds min(P, M) pairs."""
    if chunks != 1:
        raise wrong_chunks("pp.zero_bubble_h1", "one chunk", chunks, "use `pp.zero_bubble_v` for two")
    lists = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, micros)
        lists.append(numbered([F] * ahead + [F, D] * (micros - ahead) + [D] * ahead))
    return with_weight_gradients(lists, loop(stages), most=stages)

"""ZB-V: two chunks per stage in a V, no bubble but the skew of the start, in the memory of 1F1B (arXiv 2401.10241, section 6).

    stage 0  F0-F1-F2-F3-F4-F5-F6-f0-d0=w0~f1-d1=w1~f2-d2=w2~f3-d3=w3~F7-D0=W0~f4-d4=w4~ ...
    stage 1  ...F0-F1-F2-F3-F4-f0-F5-f1-d0=w0~f2-d1=w1~f3-d2=w2~F6-D0=W0~f4-d3=w3~F7-D1= ...
    stage 2  ......F0-F1-F2-f0-F3-f1-F4-f2-d0=w0~f3-d1=w1~F5-D0=W0~f4-d2=w2~F6-D1=W1~f5- ...
    stage 3  .........F0-f0-F1-f1-F2-f2-F3-f3-d0=w0~F4-D0=W0~f4-d1=w1~F5-D1=W1~f5-d2=w2~ ...

A sample goes down the stages through chunk 0 and up again through chunk 1. Stage 0 has both ends of the model, embedding and
loss, so its gradients start where its forwards end, and the last stage hands over to itself. The pattern has 2P - 1
micro-batches or more; with fewer, those that are not there are left out of it, and weight gradients fill what that leaves.
"""

from __future__ import annotations

from collections.abc import Iterator

from sley_core.api.actions import Action, Kind, v
from sley_pp.schedules.weight_gradients import with_weight_gradients
from sley_pp.schedules.words import Word, numbered, wrong_chunks

F0, F1 = (Kind.FORWARD, 0), (Kind.FORWARD, 1)
D0, D1 = (Kind.INPUT_GRADIENT, 0), (Kind.INPUT_GRADIENT, 1)


def zero_bubble_v(stages: int, chunks: int, micros: int) -> list[list[Action]]:
    """Returns one list per stage, for two chunks each placed as a V and any number of micro-batches.

    A stage holds 2 min(P, M) pairs, half a stage each. If F, D and W take the same time and M >= P, the step takes P -
    1 of them longer than its work.
    """
    if chunks != 2:
        raise wrong_chunks("pp.zero_bubble_v", "two chunks", chunks, "use `pp.zero_bubble_h1` for one")
    whole = [numbered(_pattern(stage, stages, max(micros, 2 * stages - 1))) for stage in range(stages)]
    lists = [[action for action in actions if action.micro < micros] for actions in whole]
    return with_weight_gradients(lists, v(stages), most=2 * stages)


def _pattern(stage: int, stages: int, micros: int) -> Iterator[Word]:
    """Yields the words of stage `stage` without weight gradients, for at least 2P - 1 micro-batches."""
    after = stages - 1 - stage
    yield from [F0] * (2 * after + 1)  # until the first sample is back
    yield from [F1, F0] * stage  # until the last stage has a gradient for this one
    yield from [F1, D1] * (after + 1)  # until that has come back down to chunk 0
    yield from [F0, D0, F1, D1] * (micros - stages - after)  # the steady state: all four
    yield from [D0, F1, D1] * after  # no F0 is left
    yield from [D0, D1] * stage  # no F1 is left
    yield from [D0] * (after + 1)

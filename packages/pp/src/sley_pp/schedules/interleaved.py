"""Interleaved 1F1B: several chunks per stage, dealt in a loop, so that the pipeline fills in smaller steps (arXiv 2104.04473).

    stage 0  F0-F1-F2-F3-f0-f1-f2-f3-..................b0====...b1====...b2====...b3====B0====B1====B2====B3====
    stage 1  ...F0-F1-F2-F3-f0-f1-f2-f3-.........b0====...b1====...b2====...b3====B0====B1====B2====B3====......
    stage 2  ......F0-F1-F2-F3-f0-f1-f2-...b0====f3-b1====...b2====...b3====B0====B1====B2====B3====............
    stage 3  .........F0-F1-F2-F3-f0-b0====f1-b1====f2-b2====f3-b3====B0====B1====B2====B3====..................

Micro-batches go in rounds: a round passes chunk 0, then chunk 1, ..., then the next one comes. A round is never smaller than
the pipeline is long, or a stage would wait for its own output to come round. Where M is not a multiple of P some rounds
are one larger than others, which costs memory and no time; only M < P costs time.
"""

from __future__ import annotations

from itertools import chain

from sley_core.api.actions import Action, Kind
from sley_pp.schedules.words import Word, numbered, wrong_chunks


def interleaved(stages: int, chunks: int, micros: int) -> list[list[Action]]:
    """Returns one list per stage, for two chunks per stage or more and any number of micro-batches.

    With rounds of P, stage s holds P x C + P - 1 - 2s pairs at most, and the bubble is that of 1F1B divided by C.
    """
    if chunks < 2:
        raise wrong_chunks("pp.interleaved", "two chunks or more", chunks, "use `pp.one_f_one_b` for one")
    rounds = round_sizes(stages, micros)
    there, back = range(chunks), range(chunks - 1, -1, -1)
    forwards: list[Word] = [(Kind.FORWARD, chunk) for size in rounds for chunk in there for _ in range(size)]
    backwards: list[Word] = [(Kind.BACKWARD, chunk) for size in rounds for chunk in back for _ in range(size)]
    lists = []
    for stage in range(stages):
        # The first backward comes back to this stage two hops per later stage after its last chunk has begun.
        ahead = min((chunks - 1) * rounds[0] + 2 * (stages - 1 - stage), len(forwards))
        paired = chain.from_iterable(zip(forwards[ahead:], backwards, strict=False))
        lists.append(numbered([*forwards[:ahead], *paired, *backwards[len(forwards) - ahead :]]))
    return lists


def round_sizes(stages: int, micros: int) -> list[int]:
    """Returns the most rounds possible of at least `stages` micro-batches each, as equal as can be, larger ones first."""
    num_rounds = max(1, micros // stages)
    size, larger = divmod(micros, num_rounds)
    return [size + 1] * larger + [size] * (num_rounds - larger)

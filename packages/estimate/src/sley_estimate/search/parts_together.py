"""Sums values of layers over the stages of several ways to cut a model into as many stages, all at once.

layers      0 1 2 3 4 5 6 7 0                            a zero behind the last layer
positions   0   1   2   3   0   0 1 2 3 4 5 6 7 0        one way to cut, a zero, another way to cut, a zero
stages      0   1   1   0       0 1 0 1 0 1 0 1          of each way: [ways to cut, stages]
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sley_estimate.search.stage_cut import Floats, ModelParts


class PartsTogether:
    """Ways to cut a model into parts of equally many stages. number: of each, its place among them. Its sums are those of
    `ModelParts`, to the bit: they are added in the same order, and only zeros behind them.

    is_one_chunk: of each way, whether its stages have one part of the model each, [ways to cut, 1]. starts: of each way, the
    number of its first position among those of all, zeros counted, and of one behind the last way's.
    """

    def __init__(self, every: Sequence[ModelParts]) -> None:
        self.number = {parts: at for at, parts in enumerate(every)}
        self.is_one_chunk = np.array([[parts.placement.chunks == 1] for parts in every])
        self.most_positions = max(len(parts.bounds) - 1 for parts in every)
        self.starts = list(accumulate((len(parts.bounds) for parts in every), initial=0))
        self._ends = np.concatenate([parts.bounds for parts in every])
        chunks = max(len(parts.places) for parts in every)
        firsts = np.array(self.starts[:-1])[:, np.newaxis]
        zero = self.starts[1] - 1
        self._places = np.full((chunks, len(every), every[0].placement.stages), zero)  # where a way has no such chunk
        for at, parts in enumerate(every):
            self._places[: len(parts.places), at] = parts.places + self.starts[at]
        self._firsts = np.array([parts.firsts for parts in every]) + firsts

    def by_stage(self, rows: Floats, between: Floats) -> tuple[Floats, Floats]:
        """Returns, for values of each layer with a zero behind them, [values, layers + 1], the sums of each of the first two
        over all positions before each stage's first, and of what is `between` these, [2, ways to cut, stages]; and the sums of
        all over each stage: [values, ways to cut, stages].

        between: what is between each position and the next, 0 behind the last of each way and for its zero.
        """
        sums = np.add.reduceat(rows, self._ends, axis=1)  # of the zero alone where the next way starts with layer 0
        passed = sums[:2] + between
        before = np.zeros(passed.shape)
        for start, end in pairwise(self.starts):
            np.cumsum(passed[:, start : end - 2], axis=1, out=before[:, start + 1 : end - 1])
        dealt = sums[:, self._places]
        total: Floats = dealt[:, 0]
        for chunk in range(1, dealt.shape[1]):
            total = total + dealt[:, chunk]
        return before[:, self._firsts], total

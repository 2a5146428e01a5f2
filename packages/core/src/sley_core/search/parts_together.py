"""Sums values of layers over the stages of several ways to cut a model into as many stages, all at once.

layers      0 1 2 3 4 5 6 7 | 0        a zero behind the last layer
positions   0   1   2   3   |          one way to cut: a row of sums, filled up with zeros
            0 1 2 3 4 5 6 7 |          another
stages      0   1   1   0              of each row, [ways to cut, stages]
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sley_core.search.stage_cut import Floats, ModelParts


class PartsTogether:
    """Ways to cut a model into parts of equally many stages. number: of each, its place among them. Its sums are those of
    `ModelParts`, to the bit: they are added in the same order, and nothing but zeros behind it.
    """

    def __init__(self, every: Sequence[ModelParts]) -> None:
        self.number = {parts: at for at, parts in enumerate(every)}
        self.most_positions = max(len(parts.bounds) - 1 for parts in every)
        row = self.most_positions + 1  # so that each has a zero at its end
        chunks = max(len(parts.places) for parts in every)
        behind = every[0].bounds[-1]  # where the zero is behind the layers
        ends = [[*pairwise(parts.bounds), *[(behind, behind)] * (row + 1 - len(parts.bounds))] for parts in every]
        self._ends = np.array(ends).ravel()
        zero = np.full((chunks, len(every), every[0].placement.stages), row - 1)
        for at, parts in enumerate(every):
            zero[: len(parts.places), at] = parts.places
        ways = np.arange(len(every))[:, np.newaxis] * row
        self._places = zero + ways  # [chunks, ways to cut, stages], in all rows one after another
        self._firsts = np.array([parts.firsts for parts in every]) + ways
        self._shape = len(every), row

    def by_stage(self, rows: Floats, between: Floats) -> tuple[Floats, Floats]:
        """Returns, for values of each layer with a zero behind them, [values, layers + 1], the sums of the first two over all
        positions before each stage's first, and of what is `between` these, [ways to cut, stages]; and the sums of all but the
        first over each stage: [values - 1, ways to cut, stages].

        between: values between each two positions, [ways to cut, most positions - 1]; anything where a way has none.
        """
        # Of two ends, `reduceat` sums from the first to the second, and from that to the next first: every other sum counts.
        sums = np.add.reduceat(rows, self._ends, axis=1)[:, ::2]
        before = np.zeros(self._shape)
        passed = (sums[0] + sums[1]).reshape(self._shape)[:, : between.shape[1]] + between
        np.cumsum(passed, axis=1, out=before[:, 1 : 1 + between.shape[1]])
        dealt = sums[1:, self._places]
        total: Floats = dealt[:, 0]
        for chunk in range(1, dealt.shape[1]):
            total = total + dealt[:, chunk]
        return before.ravel()[self._firsts], total

"""The most bytes that stages hold, from counts: computed once per schedule, then multiplied with the bytes of many layouts.

`peaks_of` goes through a list with the bytes of one layout, and is the reference in tests. Here each step of a list that adds
something is a row, with a column for every chunk and kind (graphs, queues, received outputs, received gradients); bytes are a
matrix product.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from sley_core.actions.action import GRADIENT_KINDS, Action, Kind, Lowered, Placement, Step, Transfer
from sley_core.actions.costs import Costs
from sley_core.actions.simulate import taken

Counts = NDArray[np.int64]

GRAPH, QUEUE, OUTPUT, GRADIENT = range(4)
"""Columns of a chunk."""

CHANGES = {
    Kind.FORWARD: ((GRAPH, 1),),
    Kind.BACKWARD: ((GRAPH, -1),),
    Kind.INPUT_GRADIENT: ((GRAPH, -1), (QUEUE, 1)),
    Kind.WEIGHT_GRADIENT: ((QUEUE, -1),),
}


WAITING = {kind: sum(change for _, change in changes) for kind, changes in CHANGES.items()}
"""How many more forwards something waits of behind an action: a graph, or a queued gradient of weights."""


def most_held(steps: Sequence[Step]) -> int:
    """Returns of how many forwards at most something waits at once, in a stage's list, which need not be lowered."""
    return max(accumulate((WAITING.get(one.kind, 0) for one in steps if isinstance(one, Action)), initial=0))


class Held:
    """Holds the counts of lowered lists."""

    def __init__(self, lists: Sequence[Lowered], placement: Placement) -> None:
        self._placement = placement
        self._counts = [_counts(steps, stage, placement) for stage, steps in enumerate(lists)]

    def most_bytes(self, costs: Costs) -> list[int]:
        """Returns for each stage the `num_bytes` that `peaks_of` would return."""
        placement, found = self._placement, []
        for stage, counts in enumerate(self._counts):
            values: list[int] = []
            for chunk in range(placement.chunks):
                at = placement.position(stage, chunk)
                before = costs.boundary_bytes[at - 1] if at else 0
                after = costs.boundary_bytes[at] if at + 1 < placement.num_positions else 0
                values += (costs.graph_bytes[at], costs.queued_bytes[at], before, after)
            found.append(int((counts @ np.array(values, dtype=np.int64)).max(initial=0)))
        return found


def _counts(steps: Lowered, stage: int, placement: Placement) -> Counts:
    """Returns the counts after every step that adds something, without repeated rows."""
    keeps = any(step.kind in GRADIENT_KINDS for step in steps if isinstance(step, Action))
    width, positions = 4 * placement.chunks, placement.positions(stage)
    flat = [0] * (width * len(steps))  # an array only at the end: numpy is slow at single numbers
    for number, step in enumerate(steps):
        first = number * width + step.chunk * 4
        if isinstance(step, Transfer):
            if step.op == "post":
                flat[first + (OUTPUT if step.flow == "forward" else GRADIENT)] += 1
            continue
        needed = taken(step, positions[step.chunk], placement)
        if needed is not None and placement.route[needed.origin] != stage:
            flat[first + (OUTPUT if step.kind is Kind.FORWARD else GRADIENT)] -= 1
        for column, change in CHANGES.get(step.kind, ()) if keeps else ():
            flat[first + column] += change
    changes = np.array(flat, dtype=np.int64).reshape(len(steps), width)
    counts = changes.cumsum(axis=0)[(changes > 0).any(axis=1)]
    return np.unique(counts, axis=0)

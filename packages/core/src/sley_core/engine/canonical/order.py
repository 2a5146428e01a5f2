"""Numbers this rank's micro-batches among those of the global batch: the leaves of each gradient's summation tree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from sley_core.engine.canonical.partial_sums import Spares
from sley_core.engine.canonical.tree import Node, cover, run_of

if TYPE_CHECKING:
    from sley_core.comm.members import Members
    from sley_core.engine.book import Entry
    from sley_core.engine.step_state import StepState


class Arrival(NamedTuple):
    """Names a contribution: the index of the layer that used the parameter, among this rank's, and the global micro-batch."""

    use: int
    micro: int


class CanonicalOrder:
    """Numbers the micro-batches of `state`'s step, by the ranks of `groups`.

    spares: memory of partial sums, of all gradients of the run. The data gives each `dp` rank a contiguous run of the global
    batch, in the order of the ranks, and `wp` ranks are neighbours: so the ranks of every reduce group have contiguous runs.
    """

    def __init__(self, state: StepState, groups: Mapping[str, Members]) -> None:
        self.state = state
        self.groups = groups
        self.spares = Spares()

    @property
    def num_leaves(self) -> int:
        """Number of micro-batches of the global batch."""
        return self.groups["dp"].size * max(1, self.state.num_micros)

    @property
    def micro(self) -> int:
        """Global number of the running micro-batch; this rank's first, for a backward between two steps."""
        action = self.state.action
        return self.state.first_micro + (0 if action is None else action.micro)

    def arrival(self, entry: Entry, layer: str = "") -> Arrival:
        """Returns the arrival of the present contribution of `entry`, used in `layer`; without a layer, in the only one."""
        assert layer or len(entry.layers) == 1, f"{entry.name} is used by {entry.layers}: which of them?"
        return Arrival(entry.layers.index(layer) if layer else 0, self.micro)

    def micros_beside(self, group: Members) -> range:
        """Returns the global number of the micro-batch that each rank of `group`, neighbours along `dp` that take the same
        actions, runs now.
        """
        step = max(1, self.state.num_micros)
        begin = self.micro - group.coord * step
        return range(begin, begin + group.size * step, step)

    def first(self, reduce_group: str) -> int:
        """Returns the first micro-batch whose gradients this rank contributes to a reduction over the group."""
        group = self.groups[reduce_group]
        return run_of(group.coord, group.size, self.num_leaves)[0]

    def is_alone(self, entry: Entry) -> bool:
        """Returns whether this rank has the whole tree of the gradient of `entry`."""
        return self.groups[entry.reduce_group].size == 1

    def nodes(self, reduce_group: str, coord: int | None = None) -> list[Node]:
        """Returns the nodes whose sums rank `coord` of the group (default: this one) contributes for each gradient, in
        order.
        """
        group = self.groups[reduce_group]
        first, last = run_of(group.coord if coord is None else coord, group.size, self.num_leaves)
        return cover(first, last, self.num_leaves)

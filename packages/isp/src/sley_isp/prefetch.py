"""Decides when to unshard and reshard parameter groups. Imports no torch.

A *pass* is the forward or the backward of a chunk. The state machine receives passes and uses of groups, and returns the groups
to reshard and to unshard:

                    known order: prefetched
            ┌────────────────────────────────────────────┐
            │                                            v
         sharded ────── use without a prefetch ───> unsharded ──> used ──┐
            ^           (demand gather)                  ^      │      │ on hold: recomputed, backward follows
            │                                            └──────┴──────┘
            └── another group is used, and this one is not among the next `ahead` ──┘

    step:    F0: a b c h     B0: h c b a     F0: a b c h     ...      known after the first pass of each type
    ahead=1  gathered at     |  use of:      a -> b, b -> c, c -> h, h -> c (of B0), c -> b, ...

The order of uses is learned from the last pass of each type and chunk. Groups are prefetched only for passes of known order,
and only within a step, since the weights change after it. All ranks of `wp` run the same passes, and so make the same
decisions.
"""

from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

Group = Hashable
"""A parameter group. The policy only compares groups."""

Key = Hashable
"""The phase, type and chunk of a pass. Passes with equal keys usually use the same groups in the same order."""


class Decision(NamedTuple):
    """The groups to reshard, and the groups to unshard after that, in order: the current group if needed, then prefetches."""

    reshard: list[Group]
    unshard: list[Group]


NO_CHANGE = Decision([], [])
"""The decision of a use that changes nothing."""


class PrefetchPolicy:
    """Decides which groups one rank unshards and reshards. unsharded: the groups that are full-size or in flight. ahead: the
    number of units to prefetch. A unit is a single group, unless `add_group` joins several.
    """

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead
        self.unsharded: list[Group] = []
        self._units: dict[Group, Hashable] = {}
        self._aheads: dict[Group, int] = {}
        self._orders: dict[Key, tuple[Group, ...]] = {}
        self._pass: Key | None = None  # None between passes
        self._later_passes: deque[Key] = deque()
        self._uses: list[Group] = []
        self._current: Group | None = None
        self._holds: Counter[Group] = Counter()
        self._is_out_of_order = False
        self._has_prefetched = False

    def add_group(self, group: Group, *, unit: Hashable, ahead: int) -> None:
        """Sets the unit of `group`. ahead: the number of units by which a prefetch of the group may precede its use, at most
        the `ahead` of the policy. Without this call, a group is a unit by itself.
        """
        self._units[group], self._aheads[group] = unit, ahead

    def begin(self, passes: Sequence[Key]) -> None:
        """Begins a list of `passes`. Regards all groups as sharded, so the caller must reshard all unsharded groups."""
        self.unsharded = []
        self._pass, self._later_passes = None, deque(passes)
        self._reset_pass()

    def begin_pass(self) -> None:
        """Begins the next pass."""
        self._pass = self._later_passes.popleft()
        self._reset_pass()

    def use(self, group: Group, *, num_holds: int = 0, can_prefetch: bool = True) -> Decision:
        """Returns the groups to reshard and unshard for a use of `group`, including prefetches of later groups. num_holds: +1
        in a recomputation, whose backward uses the group again, and -1 in that backward. can_prefetch: whether prefetches may
        start. `group` itself is always unsharded, before any prefetch.
        """
        if num_holds:
            self.change_holds(group, num_holds)
        if group != self._current:
            order, index = self._orders.get(self._pass, ()), len(self._uses)
            self._current = group
            self._has_prefetched = False
            self._uses.append(group)
            self._is_out_of_order = self._is_out_of_order or index >= len(order) or order[index] != group
        elif group in self.unsharded and (self._has_prefetched or not can_prefetch):
            return NO_CHANGE
        return self._decide(group, can_prefetch)

    def change_holds(self, group: Group, difference: int) -> None:
        """Adds `difference` to the holds of `group`, which stays unsharded while it has holds."""
        self._holds[group] += difference
        if self._holds[group] <= 0:
            del self._holds[group]

    def end_pass(self) -> Decision:
        """Ends the pass, learns its order, and returns the groups to reshard, which the next passes do not use soon."""
        self._orders[self._pass] = tuple(self._uses)
        self._pass = None
        self._reset_pass()
        return self._decide(None, False)

    def _decide(self, current: Group | None, can_prefetch: bool) -> Decision:
        """Returns the decision for a use of `current`, which is None between passes. Updates `unsharded`."""
        self._has_prefetched = self._has_prefetched or can_prefetch
        next_groups = list(self._next_groups(current))
        # Resharding comes first, so that the pool can lend the same buffers to the gathers.
        needed_groups = {current, *next_groups, *self._holds}
        reshard = [group for group in self.unsharded if group not in needed_groups]
        if reshard:
            self.unsharded = [group for group in self.unsharded if group in needed_groups]
        unshard = [current] if current is not None and current not in self.unsharded else []
        if can_prefetch:
            unshard += [group for group in next_groups if group not in self.unsharded]
        self.unsharded += unshard
        return Decision(reshard, unshard)

    def _next_groups(self, current: Group | None) -> Iterator[Group]:
        """Yields the next groups that are at most their `ahead` units away, or one unit more if `current` is None."""
        current_unit = self._units.get(current, current)
        groups: set[Group] = set()
        units: set[Hashable] = set()
        for group in self._future_groups():
            if group == current or group in groups:
                continue
            unit = self._units.get(group, group)
            if unit != current_unit:
                units.add(unit)
            limit = self.ahead + (current is None)
            if len(units) > limit:
                return
            groups.add(group)
            if len(units) <= min(limit, self._aheads.get(group, self.ahead) + (current is None)):
                yield group

    def _future_groups(self) -> Iterator[Group]:
        """Yields the remaining groups of this pass, then the groups of later passes, up to the first pass of unknown order."""
        if self._pass is not None:
            # A pass that has left the learned order depends on the data, so its later groups are unknown.
            if self._is_out_of_order or self._pass not in self._orders:
                return
            order = self._orders[self._pass]
            for index in range(len(self._uses), len(order)):  # a slice would copy the remaining groups
                yield order[index]
        for key in self._later_passes:
            if key not in self._orders:
                return
            yield from self._orders[key]

    def _reset_pass(self) -> None:
        self._uses.clear()
        self._current = None
        self._holds.clear()
        self._is_out_of_order = False
        self._has_prefetched = False

"""Decides when parameter groups are unsharded and resharded: pure decisions, no torch.

A *pass* is what a rank runs in one go: the forward or the backward of a chunk. The state machine receives passes and uses of
groups, and answers with the groups to reshard and to unshard:

                    known order: prefetched
            ┌────────────────────────────────────────────┐
            │                                            v
         sharded ──── use that was not foreseen ──> unsharded ──> used ──┐
            ^         (a demand gather)                  ^      │      │ kept: recomputed, its backward comes
            │                                            └──────┴──────┘
            └── another group is used, and this one is not among the next `ahead` ──┘

    step:    F0: a b c h     B0: h c b a     F0: a b c h     ...      known after each kind of pass ran once
    ahead=1  gathered at     |  at use of:   a -> b, b -> c, c -> h, h -> c (of B0), c -> b, ...

The order of uses is learned from a pass of each kind and chunk, followed while it proves right, and learned again from a pass
that took another order. Nothing is gathered for a pass whose order is not known, nor beyond the last pass of a step, so no
gather is older than the weights. All ranks of `wp` run the same passes and so decide alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

Group = Hashable
Key = Hashable
"""Kind and chunk of a pass: passes of one key use the same groups in the same order, unless the model changes."""


@dataclass
class Decision:
    """Lists groups to reshard and then to unshard, in this order; the group that is needed now is unsharded first."""

    reshard: list[Group] = field(default_factory=list)
    unshard: list[Group] = field(default_factory=list)


NOTHING = Decision()


class PrefetchPolicy:
    """Decides for one rank. ahead: the number of groups to prefetch before their use.

    unsharded: the groups that are full-size or in flight. A use takes time that grows with `ahead` and with the kept groups,
    not with the number of groups.
    """

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead
        self.unsharded: list[Group] = []
        self._orders: dict[Key, tuple[Group, ...]] = {}
        self._passes: Sequence[Key] = ()
        self._at = -1
        self._uses: list[Group] = []
        self._current: Group | None = None
        self._kept: dict[Group, int] = {}
        self._has_left_order = False
        self._has_prefetched = False
        self._has_ended = False

    def begin(self, passes: Sequence[Key]) -> None:
        """Starts a list of `passes`, in this order. Marks all groups as sharded: the caller must reshard them."""
        self.unsharded = []
        self._passes = passes
        self._at = -1
        self._begin_pass()

    def enter(self) -> None:
        """Starts the next pass."""
        self._at += 1
        assert self._at < len(self._passes), f"{self._at + 1} passes of {len(self._passes)}"
        self._begin_pass()

    def use(self, group: Group, *, keep: int = 0, prefetches: bool = True) -> Decision:
        """Returns what to reshard and unshard for a use of `group` now, prefetches of later groups included.

        keep: +1 in a recomputation, whose backward uses the group again; -1 in a backward. prefetches: whether prefetches may
        start; an all-gather that is needed now always does, and first.
        """
        if keep:
            self._kept[group] = self._kept.get(group, 0) + keep
            if self._kept[group] <= 0:
                del self._kept[group]
        if group != self._current:
            order, place = self._order(), len(self._uses)
            self._current = group
            self._has_prefetched = False
            self._uses.append(group)
            self._has_left_order = self._has_left_order or place >= len(order) or order[place] != group
        elif group in self.unsharded and (self._has_prefetched or not prefetches):
            return NOTHING
        return self._decide(group, prefetches)

    def before_first(self) -> Decision:
        """Returns prefetches to start when a module that is not gathered runs before the first group of a pass."""
        return NOTHING if self._current is not None or self._has_ended else self._decide(None, True)

    def leave(self) -> Decision:
        """Ends the pass: learns its order of uses, and reshards the groups that the next passes do not need soon."""
        self._orders[self._passes[self._at]] = tuple(self._uses)
        self._begin_pass()
        self._has_ended = True
        return self._decide(None, False)

    def forget(self, group: Group) -> None:
        """Marks `group` as sharded, because its weights have changed; the next use unshards it again."""
        if group in self.unsharded:
            self.unsharded.remove(group)

    def _decide(self, group: Group | None, prefetches: bool) -> Decision:
        """Returns the decision for the current `group` (None between passes), and updates `unsharded`."""
        self._has_prefetched = self._has_prefetched or prefetches
        upcoming = list(self._upcoming(group))
        # Resharding comes first, so that the pool can lend the same buffers to the gathers.
        needed = {group, *upcoming, *self._kept}
        reshard = [other for other in self.unsharded if other not in needed]
        if reshard:
            self.unsharded = [other for other in self.unsharded if other in needed]
        unshard = [group] if group is not None and group not in self.unsharded else []
        if prefetches:
            unshard += [other for other in upcoming if other not in self.unsharded]
        self.unsharded += unshard
        return Decision(reshard, unshard)

    def _upcoming(self, group: Group | None) -> Iterator[Group]:
        """Yields the next `ahead` groups other than `group`, as far as the order is known; one more if `group` is None."""
        upcoming: set[Group] = set()
        for other in self._future():
            if len(upcoming) == self.ahead + (group is None):
                return
            if other != group and other not in upcoming:
                upcoming.add(other)
                yield other

    def _future(self) -> Iterator[Group]:
        """Yields the groups of the rest of this pass, then of later ones, up to the first whose order is not known."""
        if 0 <= self._at < len(self._passes) and not self._has_ended:
            # A pass that has left the learned order does not show what comes: its forward depends on the data.
            if self._has_left_order or self._passes[self._at] not in self._orders:
                return
            order = self._order()
            for place in range(len(self._uses), len(order)):  # a slice would copy the whole rest
                yield order[place]
        for later in range(self._at + 1, len(self._passes)):
            key = self._passes[later]
            if key not in self._orders:
                return
            yield from self._orders[key]

    def _order(self) -> tuple[Group, ...]:
        """Returns the learned order of the current pass, empty if none is known."""
        return self._orders.get(self._passes[self._at], ()) if 0 <= self._at < len(self._passes) else ()

    def _begin_pass(self) -> None:
        self._uses.clear()
        self._current = None
        self._kept.clear()
        self._has_left_order = False
        self._has_prefetched = False
        self._has_ended = False

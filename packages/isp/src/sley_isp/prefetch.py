"""When whole weights are gathered and when they are dropped: pure decisions, no torch.

A *unit* is what is gathered at a time (a layer's weights, or one module's). A *pass* is what a rank runs in one go: the
forward or the backward of a chunk. The machine is told of passes and uses, and answers with what to drop and to gather:

                    known order: gathered ahead
            ┌────────────────────────────────────────┐
            │                                        v
         absent ──── use that nobody foresaw ────> held ──> used ──┐
            ^         (a demand gather)              ^      │      │ pinned: recomputed, its backward comes
            │                                        └──────┴──────┘
            └── another unit is used, and this one is not among the next `ahead` ──┘

    step:    F0: a b c h     B0: h c b a     F0: a b c h     ...      known after each kind of pass ran once
    ahead=1  gathered at     |  at use of:   a -> b, b -> c, c -> h, h -> c (of B0), c -> b, ...

The order of uses is learned from a pass of each kind and chunk, followed while it proves right, and learned again from a
pass that went another way. Nothing is gathered for a pass whose order is not known, nor beyond the last pass of a step,
so no gather outlives the weights that it was made of. All ranks of a group run the same passes and so decide alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

Unit = Hashable
Key = Hashable
"""What kind of pass over which chunk: passes of one key use the same units in the same order, unless the model changes."""


@dataclass
class Decision:
    """Drop these, then gather those, in this order: what is wanted now comes first."""

    drop: list[Unit] = field(default_factory=list)
    gather: list[Unit] = field(default_factory=list)


NOTHING = Decision()


class PrefetchPolicy:
    """Decides for one rank. ahead: how many units are gathered before they are used.

    A use takes time that grows with `ahead` and with what is pinned, not with the number of units.
    held: the units that are gathered or on their way. num_demands, num_gathers, max_held: counted since the beginning.
    """

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead
        self.held: list[Unit] = []
        self.num_gathers = 0
        self.num_demands = 0
        self.max_held = 0
        self._orders: dict[Key, tuple[Unit, ...]] = {}
        self._passes: Sequence[Key] = ()
        self._at = -1
        self._seen: list[Unit] = []
        self._strayed = False
        self._current: Unit | None = None
        self._has_launched = False
        self._ended = False
        self._pins: dict[Unit, int] = {}

    def begin(self, passes: Sequence[Key]) -> None:
        """`passes` will come, in this order. Whatever was held is dropped: the caller sees to it."""
        self.held = []
        self._passes = passes
        self._at = -1
        self._close()

    def enter(self) -> None:
        """The next pass starts."""
        self._at += 1
        assert self._at < len(self._passes), f"{self._at + 1} passes of {len(self._passes)}"
        self._close()

    def use(self, unit: Unit, *, pins: int = 0, launches: bool = True) -> Decision:
        """`unit` is used now. pins: +1 in a recomputation, whose backward will use it again; -1 in a backward.

        launches: whether gathers ahead may start; a gather that is wanted now always does, and first.
        """
        if pins:
            self._pin(unit, pins)
        if unit == self._current:
            if unit in self.held and (self._has_launched or not launches):
                return NOTHING
        else:
            self._current = unit
            self._has_launched = False
            order, place = self._order(), len(self._seen)
            self._seen.append(unit)
            self._strayed = self._strayed or place >= len(order) or order[place] != unit
        return self._decide(unit, launches)

    def pass_by(self) -> Decision:
        """Something runs that needs nothing gathered, before any unit of this pass: what comes next may start."""
        return NOTHING if self._current is not None or self._ended else self._decide(None, True)

    def leave(self) -> Decision:
        """The pass ends: its order is learned, and what the next ones do not want soon is dropped."""
        self._orders[self._passes[self._at]] = tuple(self._seen)
        self._close(ended=True)
        return self._decide(None, False)

    def forget(self, unit: Unit) -> None:
        """What is held of `unit` is worth nothing: its weights have changed."""
        if unit in self.held:
            self.held.remove(unit)

    def _pin(self, unit: Unit, pins: int) -> None:
        number = self._pins.get(unit, 0) + pins
        if number > 0:
            self._pins[unit] = number
        else:
            self._pins.pop(unit, None)

    def _decide(self, unit: Unit | None, launches: bool) -> Decision:
        self._has_launched = self._has_launched or launches
        wanted = list(self._upcoming(unit))
        # Drops come first, so that the pool can lend the same buffers to the gathers.
        keep = {unit, *wanted, *self._pins}
        drop = [one for one in self.held if one not in keep]
        if drop:
            self.held = [one for one in self.held if one in keep]
        demand = unit is not None and unit not in self.held
        gather = [unit] if demand else []  # the one that is waited for goes first on the wire
        if launches:
            gather += [one for one in wanted if one not in self.held]
        self.held += gather
        self.num_gathers += len(gather)
        self.num_demands += demand
        self.max_held = max(self.max_held, len(self.held))
        return Decision(drop, gather)

    def _upcoming(self, unit: Unit | None) -> Iterator[Unit]:
        """The next `ahead` units other than `unit`, as far as the order is known; between passes, one more."""
        found: set[Unit] = set()
        for one in self._future():
            if len(found) == self.ahead + (unit is None):
                return
            if one != unit and one not in found:
                found.add(one)
                yield one

    def _future(self) -> Iterator[Unit]:
        """Yields the units of the rest of this pass, then of later ones, up to the first whose order is not known."""
        at = self._at
        if 0 <= at < len(self._passes) and not self._ended:
            # A pass that left the order it once had says nothing of what comes: its forward depends on the data.
            if self._strayed or self._passes[at] not in self._orders:
                return
            order = self._order()
            for place in range(len(self._seen), len(order)):  # a slice would copy all that is left
                yield order[place]
        for later in range(at + 1, len(self._passes)):
            key = self._passes[later]
            if key not in self._orders:
                return
            yield from self._orders[key]

    def _order(self) -> tuple[Unit, ...]:
        if not 0 <= self._at < len(self._passes):
            return ()
        return self._orders.get(self._passes[self._at], ())

    def _close(self, ended: bool = False) -> None:
        self._seen = []
        self._strayed = False
        self._current = None
        self._pins.clear()
        self._ended = ended

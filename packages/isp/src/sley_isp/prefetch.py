"""Decides when full weights are gathered and when they are resharded: pure decisions, no torch.

A *unit* is what is gathered at a time (a layer's weights, or one module's). A *pass* is what a rank runs in one go: the forward
or the backward of a chunk. The state machine receives passes and uses, and answers with the units to drop and to gather:

                    known order: prefetched
            ┌────────────────────────────────────────┐
            │                                        v
         absent ──── use that was not foreseen ──> held ──> used ──┐
            ^         (a demand gather)              ^      │      │ pinned: recomputed, its backward comes
            │                                        └──────┴──────┘
            └── another unit is used, and this one is not among the next `ahead` ──┘

    step:    F0: a b c h     B0: h c b a     F0: a b c h     ...      known after each kind of pass ran once
    ahead=1  gathered at     |  at use of:   a -> b, b -> c, c -> h, h -> c (of B0), c -> b, ...

The order of uses is learned from a pass of each kind and chunk, followed while it proves right, and learned again from a pass
that took another order. Nothing is gathered for a pass whose order is not known, nor beyond the last pass of a step, so no
gather is older than the weights. All ranks of a group run the same passes and so decide alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

Unit = Hashable
Key = Hashable
"""Kind and chunk of a pass: passes of one key use the same units in the same order, unless the model changes."""


@dataclass
class Decision:
    """Lists units to drop and then to gather, in this order; the unit that is needed now is gathered first."""

    drop: list[Unit] = field(default_factory=list)
    gather: list[Unit] = field(default_factory=list)


NOTHING = Decision()


class PrefetchPolicy:
    """Decides what one rank gathers and drops. ahead: the number of units to prefetch before their use.

    held: the units that are gathered or in flight. num_demands, num_gathers, max_held: counted since the beginning. A
    use takes time that grows with `ahead` and with the pinned units, not with the number of units.
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
        """Starts a list of `passes`, in this order. Marks all units as dropped: the caller must drop them."""
        self.held = []
        self._passes = passes
        self._at = -1
        self._close()

    def enter(self) -> None:
        """Starts the next pass."""
        self._at += 1
        assert self._at < len(self._passes), f"{self._at + 1} passes of {len(self._passes)}"
        self._close()

    def use(self, unit: Unit, *, pins: int = 0, launches: bool = True) -> Decision:
        """Returns what to drop and gather for a use of `unit` now, prefetches of later units included.

        pins: +1 in a recomputation, whose backward uses the unit again; -1 in a backward. launches: whether prefetches
        may start; a gather that is needed now always does, and first.
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
        """Returns prefetches to start when a module without gathered weights runs before the first unit of a pass."""
        return NOTHING if self._current is not None or self._ended else self._decide(None, True)

    def leave(self) -> Decision:
        """Ends the pass: learns its order of uses, and returns the units that the next passes do not need soon as drops."""
        self._orders[self._passes[self._at]] = tuple(self._seen)
        self._close(ended=True)
        return self._decide(None, False)

    def forget(self, unit: Unit) -> None:
        """Marks `unit` as not gathered, because its weights have changed; the next use gathers it again."""
        if unit in self.held:
            self.held.remove(unit)

    def _pin(self, unit: Unit, pins: int) -> None:
        """Adds `pins` to the pins of `unit`; a unit with any is not dropped."""
        number = self._pins.get(unit, 0) + pins
        if number > 0:
            self._pins[unit] = number
        else:
            self._pins.pop(unit, None)

    def _decide(self, unit: Unit | None, launches: bool) -> Decision:
        """Returns the drops and gathers for the current `unit` (None between passes), and updates `held` and the counts."""
        self._has_launched = self._has_launched or launches
        wanted = list(self._upcoming(unit))
        # Drops come first, so that the pool can lend the same buffers to the gathers.
        keep = {unit, *wanted, *self._pins}
        drop = [one for one in self.held if one not in keep]
        if drop:
            self.held = [one for one in self.held if one in keep]
        demand = unit is not None and unit not in self.held
        gather = [unit] if demand else []  # the unit that is waited for is sent first
        if launches:
            gather += [one for one in wanted if one not in self.held]
        self.held += gather
        self.num_gathers += len(gather)
        self.num_demands += demand
        self.max_held = max(self.max_held, len(self.held))
        return Decision(drop, gather)

    def _upcoming(self, unit: Unit | None) -> Iterator[Unit]:
        """Yields the next `ahead` units other than `unit`, as far as the order is known; one more if `unit` is None."""
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
            # A pass that has left the learned order does not show what comes: its forward depends on the data.
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
        """Returns the learned order of the current pass, empty if none is known."""
        if not 0 <= self._at < len(self._passes):
            return ()
        return self._orders.get(self._passes[self._at], ())

    def _close(self, ended: bool = False) -> None:
        """Resets the state of the pass."""
        self._seen = []
        self._strayed = False
        self._current = None
        self._pins.clear()
        self._ended = ended

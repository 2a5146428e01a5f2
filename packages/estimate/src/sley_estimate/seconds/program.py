"""Says what a rank does in a step, as the simulator takes it: it computes, begins exchanges and waits for them.

    Compute F0.0 ── Begin "send F0.0" ── Begin "post B0.0" ── Compute F0.1 ── ... ── Await "post B0.0" ── Compute B0.0

An exchange has a key, equal at all its members; it starts once all of them have begun it. Members are representatives: of
ranks that do the same at the same time one program stands for all.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from sley_core.actions.action import Action


class Compute(NamedTuple):
    """The rank computes for `seconds`. action: what this is part of, for the timeline; None outside the list. host_s: of the
    host to start it, where that runs ahead.
    """

    seconds: float
    action: Action | None = None
    host_s: float = 0.0


class Exchange(NamedTuple):
    """What members of a group do together.

    key: names it; no two exchanges of a step have the same. lane: exchanges of one lane, at any member, come one after
    another. members: numbers of the programs. latency_s: seconds that nothing shares. work_s: seconds of its bytes where
    it has its link for itself. attended_s: seconds for which each member that waits for it is busy once it is done. links:
    names of what it shares with others that run then. after: the key of another, of any lane, that ends before it starts.
    """

    key: Hashable
    lane: str
    members: tuple[int, ...]
    latency_s: float
    work_s: float
    attended_s: float = 0.0
    links: tuple[Hashable, ...] = ()
    after: Hashable | None = None


class Begin(NamedTuple):
    """The rank is ready for its part of an exchange, and goes on."""

    exchange: Exchange


class Await(NamedTuple):
    """The rank goes on when the exchange `key` is done. It has begun it before."""

    key: Hashable


Word = Compute | Begin | Await
Program = Sequence[Word]

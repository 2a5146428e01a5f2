"""The catalogue of bodies: `BODIES[kind](width)` is a module that is called with (hidden, tokens)."""

from __future__ import annotations

from collections.abc import Callable

import drawn_bodies as plain
import drawn_habits as habits
from torch import nn

Make = Callable[[int], nn.Module]

POSITION_WISE: dict[str, Make] = {
    "linear": plain.Linear,
    "bare": plain.Bare,
    "feed": plain.Feed,
    "sequential": plain.Sequential,
    "adds": plain.AddsInPlace,
    "begins": plain.BeginsInPlace,
    "identity": plain.Identity,
    "scales": plain.Scales,
    "on_its_own": plain.OnItsOwn,
    "twice": habits.Twice,
    "checkpoints": habits.Checkpoints,
    "adapts": habits.Adapts,
    "half_frozen": habits.HalfFrozen,
    "reads": habits.Reads,
    "turned": habits.Turned,
    "detaches": habits.Detaches,
    "cuts_off": habits.CutsOff,
    "broadcasts": habits.Broadcasts,
    "unused": habits.Unused,
    "normed": habits.Normed,
    "normed_by_hook": habits.NormedByHook,
}
"""Bodies that a slice of a sequence computes as the whole does."""

BODIES: dict[str, Make] = POSITION_WISE | {
    "attends": plain.Attends,
    "mixes": plain.Mixes,
    "convolves": plain.Convolves,
    "recurs": plain.Recurs,
    "viewed": plain.Viewed,
    "counts": habits.Counts,
    "chooses": habits.Chooses,
}

FAULTY: dict[str, Make] = {"raises": habits.Raises}
"""Never drawn."""

BY_DATA = frozenset({"counts", "chooses"})
"""What they run depends on the tokens, which they name."""

WRITES = "begins"
"""The body that writes on what it is given."""

KEPT = frozenset({"adds", "begins", "identity", "viewed", "convolves", "recurs", "checkpoints", "reads", "counts", "chooses"})
MAY_BE_CHANGED = BODIES.keys() - KEPT
"""What they return is fresh memory that no backward reads, so the next layer may write on it."""

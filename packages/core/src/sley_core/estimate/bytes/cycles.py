"""Finds tensors that layers leave in reference cycles: only Python's collector frees those, at times of its own.

An estimate must not hang on these times. So the collector is off while a step is taken, and looks after it: what it finds then
was counted to the step's end.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass

from sley_core.estimate.bytes.ledger import Ledger


@dataclass(frozen=True)
class MemoryCycles:
    """The bytes that a step left in reference cycles, and the layer that ran when the first of them came."""

    num_bytes: int
    layer: str


def collected(ledger: Ledger) -> MemoryCycles | None:
    """Frees what a step left in reference cycles, and returns what it was; None if it left none. Takes a second where layers
    left anything that no part of the run has, since all objects are looked through; else no time.
    """
    left = [piece for piece in ledger.pieces if piece.died is None and piece.place.layer and not piece.owner]
    if not left:
        return None
    gc.collect()
    freed = [piece for piece in left if piece.died is not None]
    return MemoryCycles(sum(piece.num_bytes for piece in freed), freed[0].place.layer) if freed else None

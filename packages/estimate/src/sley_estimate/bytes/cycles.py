"""Finds tensors that layers leave in reference cycles: only Python's collector frees those, at times of its own.

An estimate must not hang on these times. So the collector is off while a step is taken, and looks after it: what it finds then
was counted to the step's end.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sley_core.process import uncollected
from sley_estimate.bytes.ledger import Ledger


@dataclass(frozen=True)
class MemoryCycles:
    """The bytes that a step left in reference cycles, and the layer that ran when the first of them came."""

    num_bytes: int
    layer: str


@contextmanager
def only_new_objects() -> Iterator[None]:
    """Keeps Python's collector from running within the block; `collected` looks only through what was made there."""
    with uncollected():
        freezes = not gc.get_freeze_count()  # whoever has frozen before had few new objects since
        if freezes:
            gc.freeze()
        try:
            yield
        finally:
            if freezes:
                gc.unfreeze()


def collected(ledger: Ledger, step: int) -> MemoryCycles | None:
    """Frees what step number `step`, which is over, left in reference cycles, and returns what it was; None if it left none.
    Looks for them only where layers, or what ran beside them, made memory in that step that is still there and nobody's.
    """
    left = [
        piece
        for piece in ledger.pieces
        if piece.died is None and piece.place.step == step and piece.place.layer and not piece.owner
    ]
    if not left:
        return None
    gc.collect(0)
    freed = [piece for piece in left if piece.died is not None]
    return MemoryCycles(sum(piece.num_bytes for piece in freed), freed[0].place.layer) if freed else None

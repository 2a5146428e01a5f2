"""`core.gradient_norms`: the norm of every parameter's gradient, in each row."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from sley_core.protocols import GradientHandler

if TYPE_CHECKING:
    from torch import Tensor

    from sley_core.engine.book import Entry
    from sley_core.engine.config import GradientNormsConfig
    from sley_core.engine.parts import Parts


class GradientNorms(GradientHandler):
    """Adds `gradient_norm/NAME` to each row, for each parameter that is trained when the run starts; 0 while it is frozen.

    The 2-norm of the whole parameter's gradient, the same in every layout: unscaled, before clipping, fp64.
    """

    def __init__(self, config: GradientNormsConfig) -> None:
        self.config = config

    def attach(self, parts: Parts) -> None:
        """Adds one number to the row for each trained parameter: the square root of the sum of all ranks' `_squares`."""
        self._store = parts.store
        for entry in parts.book.trainable:
            share = partial(self._squares, entry, parts.numbers.fraction(entry))
            parts.numbers.add(f"gradient_norm/{entry.name}", share, of="root")

    def _squares(self, entry: Entry, fraction: float) -> Tensor | float:
        """Returns this rank's share of the squared norm; the shares of all ranks add up to it. fraction: 1 over the number of
        copies.
        """
        if entry not in self._store:
            return 0.0
        # `fraction` assumes that each rank of the reduce group has all elements. If they share one copy, each element is on
        # one rank in `num_shards`, so the share is multiplied by that.
        return self._store.part(entry).double().square().sum() * fraction * self._store.num_shards(entry)

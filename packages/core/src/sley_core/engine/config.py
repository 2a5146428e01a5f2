"""The tables of the engine's own records; no torch."""

from __future__ import annotations

from sley_core.table import Fraction, Table


class EachConfig(Table):
    """`core.each`: one all-reduce per parameter. The default, and the oracle of every other reducer."""


class GradientNormsConfig(Table):
    """`core.gradient_norms`: the norm of each parameter's gradient in every row, as `gradient_norm/NAME`."""


class KeepConfig(Table):
    """`core.keep`: every layer keeps what its backward needs."""


class RecomputeConfig(Table):
    """`core.recompute`: layers keep only their inputs and are recomputed in the backward."""

    fraction: Fraction = 1.0
    """The share of the model's blocks (all layers but the first and the last) that is recomputed, from the first on; rounded to
    a whole number of blocks, halves up.
    """

"""The kinds of collective that groups have."""

from __future__ import annotations

from typing import Literal

Collective = Literal["gather", "reduce", "sum", "swap"]
"""All-gather, reduce-scatter, all-reduce, all-to-all."""

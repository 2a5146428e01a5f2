"""The tables of the plugin `wave`; no torch."""

from __future__ import annotations

from pydantic import PositiveInt

from sley_core.api.plan import Table


class HanayoConfig(Table):
    """Samples go up all stages and down again, in waves."""

    waves: PositiveInt = 1
    """How often; each wave adds two parts of the model per stage."""


class EvenConfig(Table):
    """As many layers in each part of the model as in any other, or one more."""


class LinkConfig(Table):
    """One message after another."""


class TiesConfig(Table):
    """Sums the gradients of weights that several stages hold."""

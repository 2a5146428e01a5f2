"""Gives weight communicators a rank's part of a weight, what stands in for the whole one, and products of split backwards."""

from sley_core.engine.direct import GradientUse as GradientUse
from sley_core.engine.direct import no_view as no_view
from sley_core.engine.shards import StandIn as StandIn

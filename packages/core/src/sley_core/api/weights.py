"""Shards and split backwards, for weight communicators."""

from sley_core.engine.direct import GradientUse as GradientUse
from sley_core.engine.direct import no_view as no_view
from sley_core.engine.shards import StandIn as StandIn

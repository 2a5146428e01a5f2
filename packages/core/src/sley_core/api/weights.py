"""Gives weight communicators a rank's part of a weight, what stands in for the whole one, and products of split backwards."""

from sley_core.engine.direct import Asked, asked_of, no_view
from sley_core.engine.shards import AXIS, Shard
from sley_core.engine.stand_in import StandIn, stand_in

__all__ = ["AXIS", "Asked", "Shard", "StandIn", "asked_of", "no_view", "stand_in"]

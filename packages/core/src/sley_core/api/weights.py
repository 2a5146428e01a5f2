"""Gives weight communicators a rank's part of a weight, what stands in for the whole one, and products of split backwards."""

from sley_core.engine.direct import Asked, asked_of, no_view
from sley_core.engine.shards import AXIS, Shard, StandIn, stand_in
from sley_core.weight_files.write import write_tensors, write_text

__all__ = ["AXIS", "Asked", "Shard", "StandIn", "asked_of", "no_view", "stand_in", "write_tensors", "write_text"]

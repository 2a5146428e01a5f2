"""For weight communicators: shards, split backwards, and the last linear with its loss."""

from sley_core.engine.direct import GradientUse, no_view
from sley_core.engine.shards import StandIn
from sley_core.losses.chunked_head import HeadChunks, HeadLoss, LazyLogits, LogitsHead, autocast_input

__all__ = ["GradientUse", "HeadChunks", "HeadLoss", "LazyLogits", "LogitsHead", "StandIn", "autocast_input", "no_view"]

"""Shards, split backwards and heads whose loss is computed in chunks, for weight communicators."""

from sley_core.engine.direct import GradientUse as GradientUse
from sley_core.engine.direct import no_view as no_view
from sley_core.engine.shards import StandIn as StandIn
from sley_core.losses.chunked_head import HeadChunks as HeadChunks
from sley_core.losses.chunked_head import HeadLoss as HeadLoss
from sley_core.losses.chunked_head import LazyLogits as LazyLogits
from sley_core.losses.chunked_head import LogitsHead as LogitsHead
from sley_core.losses.chunked_head import autocast_input as autocast_input

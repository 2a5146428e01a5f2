"""The tables of the plugin `dp`; no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sley_core.api.plan import Positive, PositiveFloat, Table

BF16_TOLERANCE = 2**-7
"""Each rank's term and the sum are rounded to bf16 once, by 2^-8 at most; ranks whose terms cancel may be further off."""


class ReducerConfig(Table):
    """What every reducer of `dp` has."""

    bucket_mb: PositiveFloat = 25.0
    """MiB of gradients per bucket; a parameter that is larger has one of its own."""

    start: Literal["check", "broadcast"] = "check"
    """Replicas that do not start equal: refused before the first step, or given the first one's weights and buffers."""

    @property
    def bucket_bytes(self) -> float:
        """The most bytes of gradients in a bucket, but for a larger parameter."""
        return self.bucket_mb * (1 << 20)


class BucketedConfig(ReducerConfig):
    """Sums gradients over the ranks that share a weight, bucket by bucket, while the backward runs."""

    reduction: Literal["same", "bf16"] = "same"
    """The format in which gradients travel: that of accumulation, or bf16, half of fp32's bytes and not exact."""

    @property
    def tolerance(self) -> float:
        """The relative error that a sum may have; 0 where it is the sum itself."""
        return BF16_TOLERANCE if self.reduction == "bf16" else 0.0


class ShardedConfig(ReducerConfig):
    """Sums gradients over the ranks that share a weight, and leaves each of them a part to step: its masters and states."""

    shards: Annotated[int, Field(ge=2)] | None = None
    """How many ranks share one copy of masters and states, neighbours each; left out, all that share a weight."""


class PowerSGDConfig(ReducerConfig):
    """Sums low-rank approximations of gradients; what one step leaves out is added to the next."""

    rank: Positive = 4
    """Columns of the two factors that a matrix travels as; more are closer and larger."""

    start_step: Positive = 1
    """The first step to compress, counted from 1 as in `metrics.jsonl`; those before it have plain sums."""

    error_feedback: bool = True
    """Keep what a step leaves out and add it to the next one's gradient; it takes a copy of the gradients."""

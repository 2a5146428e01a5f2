"""The tables of the plugin `dp`, and the names of its groups. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sley_core.api.plan import PositiveFloat, Table

BF16_TOLERANCE = 2**-7
"""Each rank's term and the sum are rounded to bf16 once, by 2^-8 at most; ranks whose terms cancel may be further off."""


class ReducerConfig(Table):
    """The keys that every reducer of `dp` has."""

    bucket_mb: PositiveFloat = 25.0
    """MiB of gradients per bucket; a larger parameter gets a bucket of its own."""

    start: Literal["check", "broadcast"] = "check"
    """What to do with replicas that do not start equal: refuse them before the first step, or give them the first one's weights
    and buffers.
    """

    @property
    def bucket_bytes(self) -> float:
        """The most bytes of gradients in a bucket, but for a larger parameter."""
        return self.bucket_mb * (1 << 20)


class BucketedConfig(ReducerConfig):
    """Sums gradients over the ranks that share a weight, bucket by bucket, during the backward."""

    reduction: Literal["same", "bf16"] = "same"
    """The format in which gradients are sent: that of accumulation, or bf16, half of fp32's bytes and not exact."""

    @property
    def tolerance(self) -> float:
        """The relative error that a sum may have; 0 if the sum is exact."""
        return BF16_TOLERANCE if self.reduction == "bf16" else 0.0


class ShardedConfig(ReducerConfig):
    """Reduce-scatters gradients over the ranks that share a weight; each rank steps its part, with the masters and states of
    that part.
    """

    shards: Annotated[int, Field(ge=2)] | None = None
    """How many neighbouring ranks share one copy of masters and states; left out, all ranks that share a weight."""


SUMS = "sums"
WEIGHTS = "weights"
"""The lanes of the ranks that share a copy: a gather of weights, which may wait for a layer, must not delay a sum."""


def shards_axis(reduce_group: str) -> str:
    """Returns the name of the axis of the ranks that share one copy of the states of what is reduced over `reduce_group`."""
    return f"dp.shards.{reduce_group}"


def copies_axis(reduce_group: str) -> str:
    """Returns the name of the axis of the ranks of `reduce_group` that hold the same shard."""
    return f"dp.copies.{reduce_group}"

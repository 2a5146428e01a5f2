"""The plan tables of the plugin `dp` and the axes of its process groups. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from sley_core.api.plan import Table

BF16_TOLERANCE = 2**-7
"""The relative error of a sum. Each term and the sum are rounded to bf16 once, by at most 2^-8. Cancellation can add to it."""


class ReducerConfig(Table):
    """The keys that the reducers of `dp` share."""

    bucket_mb: PositiveFloat = 25.0
    """The size of a bucket of gradients in MiB. A larger parameter gets its own bucket."""

    @property
    def bucket_bytes(self) -> float:
        """The size limit of a bucket of gradients, in bytes. Only a bucket of a single parameter may exceed it."""
        return self.bucket_mb * (1 << 20)


class BucketedConfig(ReducerConfig):
    """Sums gradients over the ranks that share a weight, bucket by bucket, during the backward."""

    reduction: Literal["same", "bf16"] = "same"
    """The dtype in which gradients are sent: the dtype in which they are accumulated, or bf16, which sends half as many bytes
    as fp32 but rounds.
    """

    @property
    def tolerance(self) -> float:
        """The allowed relative error of a sum, which is 0 for exact sums."""
        return BF16_TOLERANCE if self.reduction == "bf16" else 0.0


class ShardedConfig(ReducerConfig):
    """Reduce-scatters gradients over the ranks that share a weight. Each rank updates one shard and holds the shard's master
    weights and optimizer states.
    """

    shards: Annotated[int, Field(ge=2)] | None = None
    """The number of neighbouring ranks that share one copy of master weights and optimizer states. Default: all ranks that
    share a weight.
    """


SUMS = "sums"
WEIGHTS = "weights"
"""The two channels of a shards axis. A gather of weights may wait for a layer, and must not delay a sum."""


def shards_axis(reduce_group: str) -> str:
    """Returns the axis of the ranks of `reduce_group` that share one copy of the optimizer states."""
    return f"dp.shards.{reduce_group}"


def copies_axis(reduce_group: str) -> str:
    """Returns the axis of the ranks of `reduce_group` that hold the same shard."""
    return f"dp.copies.{reduce_group}"

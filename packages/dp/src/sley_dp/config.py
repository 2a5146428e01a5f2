"""The tables of the plugin `dp`; no torch."""

from __future__ import annotations

from typing import Literal

from sley_core.plan.types import PositiveFloat, Table


class BucketedConfig(Table):
    """Sums gradients over the ranks that share a weight, bucket by bucket, while the backward runs."""

    bucket_mb: PositiveFloat = 25.0
    """MiB of gradients per bucket; a parameter that is larger has one of its own."""

    reduction: Literal["same", "bf16"] = "same"
    """The format in which gradients travel and are summed: that of accumulation, or bf16, which is half of fp32."""

    start: Literal["broadcast", "check", "trust"] = "broadcast"
    """Before the first step: give every replica the first one's weights and buffers, compare them, or neither."""

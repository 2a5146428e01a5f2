"""What the plugin `dp` has."""

from __future__ import annotations

from sley_core.hookspecs import hookimpl
from sley_core.records import GradientHandlerRecord
from sley_dp.config import BucketedConfig


@hookimpl
def sley_gradient_handlers() -> list[GradientHandlerRecord]:
    return [
        GradientHandlerRecord(
            name="bucketed",
            config=BucketedConfig,
            build="sley_dp.bucketed:Bucketed",
            role="reducer",
            summary="Flat buckets, reduced while the backward runs.",
        ),
    ]

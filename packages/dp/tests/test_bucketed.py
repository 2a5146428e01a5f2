"""`dp.bucketed` holds the contract of gradient handlers, in every shape of its options."""

from __future__ import annotations

from typing import ClassVar

from sley_core.testing.contract import GradientHandlerContract


class TestOneBucket(GradientHandlerContract):
    handler: ClassVar[dict] = {"use": "dp.bucketed"}


class TestOneBucketPerParameter(GradientHandlerContract):
    handler: ClassVar[dict] = {"use": "dp.bucketed", "bucket_mb": 1e-5}


class TestCheckedStart(GradientHandlerContract):
    handler: ClassVar[dict] = {"use": "dp.bucketed", "start": "check"}

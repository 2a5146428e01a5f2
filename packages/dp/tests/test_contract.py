"""The reducers of `dp` hold the contract of gradient handlers, in every shape of their options."""

from __future__ import annotations

from typing import ClassVar

import pytest

from sley_testing.contract import GradientHandlerContract


class TestOneBucket(GradientHandlerContract):
    handler: ClassVar[dict] = {"use": "dp.bucketed"}


@pytest.mark.campaign
class TestOneBucketPerParameter(GradientHandlerContract):
    handler: ClassVar[dict] = {"use": "dp.bucketed", "bucket_mb": 1e-5, "start": "check"}


class TestNarrow(GradientHandlerContract):
    handler: ClassVar[dict] = {"use": "dp.bucketed", "bucket_mb": 1e-5, "reduction": "bf16"}


class TestSharded(GradientHandlerContract):
    handler: ClassVar[dict] = {"use": "dp.sharded", "bucket_mb": 1e-5}

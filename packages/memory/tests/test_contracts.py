"""The pool and the offload managers of `memory` hold their contracts."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from sley_testing.offload_contract import OffloadManagerContract
from sley_testing.pool_contract import MemoryPoolContract


class TestSizeClasses(MemoryPoolContract):
    pool: ClassVar[dict[str, Any]] = {"use": "memory.size_classes"}


class TestEverything(OffloadManagerContract):
    """Tests of races draw many orders."""

    orders = 1
    offload: ClassVar[dict[str, Any]] = {"use": "memory.everything", "bucket_mb": 0.004}


class TestBetweenSteps(OffloadManagerContract):
    orders = 1
    offload: ClassVar[dict[str, Any]] = {"use": "memory.optimizer_states", "when": "between_steps", "bucket_mb": 0.01}


@pytest.mark.campaign  # they leave with everything, above
class TestGradients(OffloadManagerContract):
    orders = 1
    offload: ClassVar[dict[str, Any]] = {"use": "memory.gradients"}

"""Tests the contracts of the offload managers of `memory`."""

from typing import Any, ClassVar

import pytest

from sley_testing.state_contract import OffloadManagerContract


class TestEverything(OffloadManagerContract):
    """Tests few orders, since the tests of races draw many."""

    orders = 1
    offload: ClassVar[dict[str, Any]] = {"use": "memory.everything", "bucket_mb": 0.004}


@pytest.mark.campaign  # other tests train with it
class TestBetweenSteps(OffloadManagerContract):
    orders = 1
    offload: ClassVar[dict[str, Any]] = {"use": "memory.optimizer_states", "when": "between_steps", "bucket_mb": 0.01}

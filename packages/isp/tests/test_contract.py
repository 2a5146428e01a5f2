"""`isp.communicator` holds the contract of weight communicators, in the forms that share least code."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from sley_core.testing.weight_contract import WeightCommunicatorContract


class TestByLayer(WeightCommunicatorContract):
    weights: ClassVar[dict[str, Any]] = {"use": "isp.communicator"}


class TestByModuleAndOncePerStep(WeightCommunicatorContract):
    weights: ClassVar[dict[str, Any]] = {"use": "isp.communicator", "unit": "module", "ahead": 2, "reduce": "step"}


@pytest.mark.campaign
class TestNotOverlapped(WeightCommunicatorContract):
    weights: ClassVar[dict[str, Any]] = {"use": "isp.communicator", "overlap": False, "pool": "isp.fresh"}

"""`isp.communicator` holds the contract of weight communicators, in the forms that share least code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from sley_testing.ranks import Ranks
from sley_testing.weight_contract import WeightCommunicatorContract


class TestByLayer(WeightCommunicatorContract):
    weights: ClassVar[dict[str, Any]] = {"use": "isp.communicator"}


class TestByModuleAndOncePerStep(WeightCommunicatorContract):
    weights: ClassVar[dict[str, Any]] = {"use": "isp.communicator", "unit": "module", "ahead": 2, "reduce": "step"}

    @pytest.mark.parametrize(
        ("world", "wp", "micros", "changes"),
        [
            (2, 2, 3, {"activations": {"use": "core.recompute", "fraction": 1.0}}),
            pytest.param(2, 2, 1, {}, marks=pytest.mark.campaign),
            pytest.param(4, 2, 2, {}, marks=pytest.mark.campaign),
            pytest.param(4, 4, 1, {"activations": {"use": "core.recompute", "fraction": 0.5}}, marks=pytest.mark.campaign),
        ],
    )
    def test_every_layout_gives_the_numbers_of_whole_weights(
        self, ranks: Callable[..., Ranks], world: int, wp: int, micros: int, changes: dict[str, Any]
    ) -> None:
        """The contract's layouts, of which one is looked at in every run."""
        super().test_every_layout_gives_the_numbers_of_whole_weights(ranks, world, wp, micros, changes)


@pytest.mark.campaign
class TestNotOverlapped(WeightCommunicatorContract):
    weights: ClassVar[dict[str, Any]] = {"use": "isp.communicator", "overlap": False}

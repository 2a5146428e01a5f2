"""`isp.communicator` holds the contract of weight communicators, in the forms that share least code; `isp.all_to_all` that of
sequence attentions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from sley_testing.attention_contract import SequenceAttentionContract
from sley_testing.ranks import Ranks
from sley_testing.weight_contract import WeightCommunicatorContract


class TestByLayer(WeightCommunicatorContract):
    weights: ClassVar[dict[str, Any]] = {"use": "isp.communicator"}


class TestByModuleAndOncePerStep(WeightCommunicatorContract):
    weights: ClassVar[dict[str, Any]] = {"use": "isp.communicator", "unit": "module", "ahead": 2, "reduce": "step"}

    @pytest.mark.parametrize(
        ("world", "wp", "micros", "changes"), [(2, 2, 3, {"activations": {"use": "core.recompute", "fraction": 1.0}})]
    )
    def test_every_layout_gives_the_numbers_of_whole_weights(
        self, ranks: Callable[..., Ranks], world: int, wp: int, micros: int, changes: dict[str, Any]
    ) -> None:
        """One of the contract's layouts."""
        super().test_every_layout_gives_the_numbers_of_whole_weights(ranks, world, wp, micros, changes)


class TestAllToAll(SequenceAttentionContract):
    sequence: ClassVar[dict[str, Any]] = {"use": "isp.all_to_all"}

"""Tests that `narrow.reducer` passes the contract of gradient handlers, and sends small gradients unchanged."""

from collections.abc import Callable
from typing import Any, ClassVar

from sley_testing.contract import GradientHandlerContract, observe


class TestNarrow(GradientHandlerContract):
    handler: ClassVar[dict[str, Any]] = {"use": "narrow.reducer", "min_numel": 0}


def test_small_gradients_are_not_rounded(ranks: Callable[..., Any]) -> None:
    """The weights of the contract's model have 36 elements and its biases 6."""
    exact, _ = ranks(2)(observe, [{"use": "core.each"}], 1, False)
    narrow, _ = ranks(2)(observe, [{"use": "narrow.reducer", "min_numel": 36}], 1, False)
    weights, biases = "second.often.weight", "second.often.bias"
    assert not narrow.gradients[0][weights].equal(exact.gradients[0][weights])
    assert narrow.gradients[0][biases].equal(exact.gradients[0][biases])

"""The contract of gradient handlers holds for simple ones, each where its record says that it must stand."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from sley_core.testing.contract import GradientHandlerContract

pytestmark = pytest.mark.usefixtures("naive")


class TestLate(GradientHandlerContract):
    handler: ClassVar[dict[str, Any]] = {"use": "naive.late"}


class TestHalves(GradientHandlerContract):
    handler: ClassVar[dict[str, Any]] = {"use": "naive.halves"}


class Early(GradientHandlerContract):
    handler: ClassVar[dict[str, Any]] = {"use": "naive.early"}


class Hoards(GradientHandlerContract):
    handler: ClassVar[dict[str, Any]] = {"use": "naive.hoards"}


def test_a_handler_that_must_stand_before_the_reducer_can_hold_the_contract(ranks: Any) -> None:
    Early().test_reduces_as_its_record_promises(ranks(2), 1)
    Early().test_recovers_from_a_failed_backward(ranks(2))


def test_a_handler_that_keeps_what_a_failed_step_left_does_not(ranks: Any) -> None:
    Hoards().test_reduces_as_its_record_promises(ranks(2), 3)
    with pytest.raises(AssertionError, match=r"second\.often"):
        Hoards().test_recovers_from_a_failed_backward(ranks(2))

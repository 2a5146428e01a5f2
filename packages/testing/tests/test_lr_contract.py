"""The contract of learning-rate schedules holds for a simple one, and says what is wrong with each that is wrong on purpose."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from sley_testing.optimizer_contract import LRScheduleContract

pytestmark = pytest.mark.usefixtures("wrong")

WRONG = [
    ("counting", "a_rate_depends_on_its_step_alone", (), "a run that goes on from there has other rates"),
    ("negative", "every_step_has_a_rate", (), "the factor of step 101 is -0.01.*uphill"),
    ("nothing", "every_step_has_a_rate", (), "no step of the run has a rate above 0"),
    ("none", "every_step_has_a_rate", (), "the factor of step 100 is a NoneType, not a number"),
    ("short", "a_short_run_has_rates_or_is_refused", (1,), "with run.steps = 1: ZeroDivisionError"),
]


class TestNaive(LRScheduleContract):
    learning_rate: ClassVar[dict[str, Any]] = {"use": "wrong.naive"}


@pytest.mark.parametrize(("name", "test", "arguments", "words"), WRONG)
def test_what_is_wrong_is_said(name: str, test: str, arguments: tuple[int, ...], words: str) -> None:
    class Wrong(LRScheduleContract):
        learning_rate: ClassVar[dict[str, Any]] = {"use": f"wrong.{name}"}

    with pytest.raises(AssertionError, match=words):
        getattr(Wrong(), f"test_{test}")(*arguments)

"""The contract of scheduler hooks holds for a simple one, and says what is wrong with each that is wrong on purpose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sley_testing.hook_contract import SchedulerHookContract
from sley_testing.ranks import Ranks

pytestmark = pytest.mark.usefixtures("wrong")

NUMBERS = "a_run_has_the_same_numbers_with_it"
WRONG = [
    ("scales", NUMBERS, "with the hook, rank 0, step 1: loss is .*, not "),
    ("unbalanced", "a_failed_step_leaves_nothing_in_it", "after a step that failed, rank 0, step 2: .* is .*, not "),
    ("differs", "ranks_exchange_in_one_order", r"the order on control\[0,1\] is not the same on all ranks"),
    ("keeps", "it_keeps_no_graph", r"after step 1 the hook keeps tensors with their graph: \["),
    ("asked", "its_counts_are_numbers", "counts change when they are asked for"),
    ("hooked", NUMBERS, "_forward_hooks"),
]


class TestNaive(SchedulerHookContract):
    hook: ClassVar[dict[str, Any]] = {"use": "wrong.naive"}


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "test", "words"), WRONG)
def test_what_is_wrong_is_said(ranks: Callable[..., Ranks], texts: Path, name: str, test: str, words: str) -> None:
    class Wrong(SchedulerHookContract):
        hook: ClassVar[dict[str, Any]] = {"use": f"wrong.{name}"}

    with pytest.raises(AssertionError, match=words):
        getattr(Wrong(), f"test_{test}")(ranks, texts)


def test_a_hook_that_wants_tensors_of_every_action(texts: Path) -> None:
    class Asks(SchedulerHookContract):
        hook: ClassVar[dict[str, Any]] = {"use": "wrong.asks"}

    with pytest.raises(AssertionError, match="before_backward in phase weights, given None: AttributeError"):
        Asks().test_it_takes_what_actions_have(texts)

"""The contract of gradient handlers holds for simple ones, each where its record says that it must stand."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from sley_testing.contract import GradientHandlerContract

pytestmark = pytest.mark.usefixtures("naive")


class TestLate(GradientHandlerContract):
    handler: ClassVar[dict[str, Any]] = {"use": "naive.late"}


class TestHalves(GradientHandlerContract):
    handler: ClassVar[dict[str, Any]] = {"use": "naive.halves"}


class Early(GradientHandlerContract):
    handler: ClassVar[dict[str, Any]] = {"use": "naive.early"}


NUMBERS, SEQUENCE = "reduces_as_its_record_promises", "ranks_issue_one_sequence_once_per_step"
BITS = "is_deterministic_and_equal_on_all_ranks"
WRONG = [
    ("mean", NUMBERS, (1,), "step 0: the gradient of second.often.weight is not the sum over the reduce group: its norm is "),
    ("world", NUMBERS, (1,), "step 0: the gradient of first.weight is not what this rank has: "),
    ("too_early", NUMBERS, (3,), "the gradient of .* is not the sum over the reduce group"),
    ("tail", NUMBERS, (1,), "step 0: the gradient of second.often.bias is not the sum over the reduce group"),
    ("reverse", NUMBERS, (1,), "step 0: the gradient of second.* is not the sum over the reduce group"),
    ("twice", NUMBERS, (1,), "step 0: the gradient of second.often.weight is not the sum over the reduce group"),
    ("coarse", NUMBERS, (1,), "relative error .* after 1 steps; its record allows 0.0156"),
    ("chatty", SEQUENCE, (), "a step of one micro-batch has .* collectives, and of three "),
    ("types", SEQUENCE, (), r"the order on control\[0,1\] is not the same on all ranks"),
    ("noisy", BITS, (), "a second run gives other bits: rank 0, step 0: the gradients of "),
    ("apart", BITS, (), "step 0: ranks that hold one weight have different gradients of it: "),
    ("hoards", "recovers_from_a_failed_backward", (), "after a step that failed there are other bits: rank 0, step 2"),
    ("watches", "detach_leaves_nothing", (), "a handler installs no autograd hooks"),
]


def test_a_handler_that_must_stand_before_the_reducer_can_hold_the_contract(ranks: Any) -> None:
    Early().test_reduces_as_its_record_promises(ranks(2), 1)
    Early().test_recovers_from_a_failed_backward(ranks(2))


@pytest.mark.sample(5)
@pytest.mark.parametrize(("name", "test", "arguments", "words"), WRONG)
def test_what_is_wrong_is_said(ranks: Any, name: str, test: str, arguments: tuple[int, ...], words: str) -> None:
    class Wrong(GradientHandlerContract):
        handler: ClassVar[dict[str, Any]] = {"use": f"naive.{name}"}

    with pytest.raises(AssertionError, match=f"(?s){words}"):
        getattr(Wrong(), f"test_{test}")(ranks(2), *arguments)


def test_what_only_a_failed_step_shows_is_right_without_one(ranks: Any) -> None:
    class Hoards(GradientHandlerContract):
        handler: ClassVar[dict[str, Any]] = {"use": "naive.hoards"}

    Hoards().test_reduces_as_its_record_promises(ranks(2), 3)

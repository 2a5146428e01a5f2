"""Schedules of somebody else's hold the contract of schedules; each that is broken fails in the test that is meant for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sley_core.errors import PlanError
from sley_testing.ranks import Ranks
from sley_testing.schedule_contract import ScheduleContract, TieContract

pytestmark = pytest.mark.usefixtures("installed")

WITHOUT_RANKS = [name for name in vars(ScheduleContract) if name.startswith("test_") and "two_stages" not in name]


class TestHanayo(ScheduleContract):
    pipeline: ClassVar[dict[str, Any]] = {"use": "wave.hanayo", "waves": 1}

    def most_held(self, stage: int, stages: int, micros: int) -> int:
        return 2 * min(stages, micros)


@pytest.mark.campaign
class TestTwoWaves(ScheduleContract):
    pipeline: ClassVar[dict[str, Any]] = {"use": "wave.hanayo", "waves": 2}

    def most_held(self, stage: int, stages: int, micros: int) -> int:
        return 4 * min(stages, micros)


class OneByOne(ScheduleContract):
    """The claim of a schedule that ends each micro-batch before the next one begins."""

    def most_held(self, stage: int, stages: int, micros: int) -> int:
        return 1


def named(name: str) -> ScheduleContract:
    class Named(OneByOne):
        pipeline: ClassVar[dict[str, Any]] = {"use": f"broken.{name}"}

    return Named()


@pytest.mark.parametrize("test", WITHOUT_RANKS)
def test_the_slowest_schedule_is_a_right_one(test: str) -> None:
    getattr(named("one_by_one"), test)()


@pytest.mark.parametrize(
    ("name", "test", "words"),
    [
        ("blocked", "test_lists_of_any_size_run_to_their_end", "schedule-deadlock"),
        ("careless", "test_every_micro_batch_goes_once_through_every_chunk", r"\('F', 1\).*not FB or FIW"),
        ("greedy", "test_a_stage_holds_what_it_says", "holds .*, and says 1"),
        ("forgetful", "test_lists_are_the_same_on_all_ranks", "two calls give other lists"),
    ],
)
def test_a_broken_schedule_fails(name: str, test: str, words: str) -> None:
    with pytest.raises((AssertionError, PlanError), match=words):
        getattr(named(name), test)()


class TestTies(TieContract):
    pipeline: ClassVar[dict[str, Any]] = {"use": "broken.one_by_one"}
    tables: ClassVar[dict[str, Any]] = {"gradient_handlers": [{"use": "wave.ties"}]}


@pytest.mark.parametrize("name", ["twice", "unsummed"])
def test_a_wrong_handler_of_ties_fails(ranks: Callable[..., Ranks], texts: Path, name: str) -> None:
    class Torn(TieContract):
        pipeline: ClassVar[dict[str, Any]] = {"use": "broken.one_by_one"}
        tables: ClassVar[dict[str, Any]] = {"gradient_handlers": [{"use": f"broken.{name}"}]}

    with pytest.raises(AssertionError, match=r"differ by more than 1e-10, the worst first\n  embed"):
        Torn().test_two_stages_train_a_shared_weight_as_one_process(ranks, texts)

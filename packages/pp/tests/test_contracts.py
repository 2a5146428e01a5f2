"""Tests `pp.link` and every schedule of `pp` except `pp.csv` against their contracts."""

from typing import Any, ClassVar

import pytest

from sley_pp.schedules import round_sizes
from sley_testing.pipeline_contract import ScheduleContract, StageLinkContract, TieContract


@pytest.mark.campaign  # the parity table compares it
class TestGPipe(ScheduleContract):
    pipeline: ClassVar[dict[str, Any]] = {"use": "pp.gpipe"}

    def max_micro_batches(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        return num_microbatches


@pytest.mark.campaign  # other tests train with it
class TestOneFOneB(ScheduleContract):
    pipeline: ClassVar[dict[str, Any]] = {"use": "pp.one_f_one_b"}

    def max_micro_batches(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        return min(num_stages - stage, num_microbatches)


class TestInterleaved(ScheduleContract):
    pipeline: ClassVar[dict[str, Any]] = {"use": "pp.interleaved", "chunks": 3}

    def max_micro_batches(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        return min(3 * num_microbatches, 2 * round_sizes(num_stages, num_microbatches)[0] + 2 * (num_stages - stage) - 1)


@pytest.mark.campaign  # other tests train with it
class TestZeroBubbleH1(ScheduleContract):
    pipeline: ClassVar[dict[str, Any]] = {"use": "pp.zero_bubble_h1"}

    def max_micro_batches(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        return min(num_stages, num_microbatches)


class TestZeroBubbleV(ScheduleContract):
    pipeline: ClassVar[dict[str, Any]] = {"use": "pp.zero_bubble_v"}

    def max_micro_batches(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        return 2 * min(num_stages, num_microbatches)


class TestSharedModules(TieContract):
    """Tests `pp.shared_modules`, which the schedule's record names."""

    pipeline: ClassVar[dict[str, Any]] = {"use": "pp.one_f_one_b"}


LIST_TESTS = [name for name in vars(ScheduleContract) if name.startswith("test_") and "two_stages" not in name]


CLASSES_IN_CAMPAIGN = (TestGPipe, TestOneFOneB, TestZeroBubbleH1)
DRAWS = [
    *((schedule, ScheduleContract.num_draws) for schedule in CLASSES_IN_CAMPAIGN),
    *(pytest.param(one, 400, marks=pytest.mark.campaign) for one in (*CLASSES_IN_CAMPAIGN, TestInterleaved, TestZeroBubbleV)),
]


@pytest.mark.parametrize("test", LIST_TESTS)
@pytest.mark.parametrize(("schedule", "num_draws"), DRAWS)
def test_lists_of_schedules(schedule: type[ScheduleContract], test: str, num_draws: int) -> None:
    contract = schedule()
    contract.num_draws = num_draws  # type: ignore[misc]  # of this one alone
    getattr(contract, test)()


class TestLink(StageLinkContract):
    link: ClassVar[dict[str, Any]] = {"use": "pp.link"}

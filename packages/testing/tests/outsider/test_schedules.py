"""Tests a pipeline of a third party, with its schedule, link and tie handler, and parts with one bug each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sley_core.errors import PlanError, RunError
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict
from sley_testing.pipeline_contract import ScheduleContract, StageLinkContract, TieContract
from sley_testing.plans import small_plan
from sley_testing.ranks import Ranks

pytestmark = pytest.mark.usefixtures("installed")


class TestHanayo(ScheduleContract):
    pipeline: ClassVar[dict[str, Any]] = {"use": "wave.hanayo", "waves": 1}

    def max_micro_batches(self, stage: int, num_stages: int, num_microbatches: int) -> int:
        return 2 * min(num_stages, num_microbatches)


def contract_of(name: str) -> ScheduleContract:
    """Returns the contract of a schedule that claims to hold one microbatch at a time."""

    class BrokenSchedule(ScheduleContract):
        pipeline: ClassVar[dict[str, Any]] = {"use": "broken.schedule", "bug": name}

        def max_micro_batches(self, stage: int, num_stages: int, num_microbatches: int) -> int:
            return 1

    return BrokenSchedule()


@pytest.mark.parametrize(
    ("name", "test", "message"),
    [
        ("blocked", "test_lists_complete_at_any_size", "schedule-deadlock"),
        ("careless", "test_each_micro_batch_visits_each_chunk_once", "has F, not FB or FIW"),
        ("greedy", "test_peak_equals_max_micro_batches", "holds .*, but `max_micro_batches` is 1"),
        ("forgetful", "test_lists_are_deterministic", "two calls return different lists"),
    ],
)
def test_schedule_bug_is_reported(name: str, test: str, message: str) -> None:
    getattr(contract_of("one_by_one"), test)()
    with pytest.raises((AssertionError, PlanError), match=message):
        getattr(contract_of(name), test)()


def test_tie_that_is_summed_twice_is_reported(ranks: Callable[..., Ranks], texts: Path) -> None:
    class BrokenTies(TieContract):
        pipeline: ClassVar[dict[str, Any]] = {"use": "broken.schedule", "bug": "one_by_one"}
        tables: ClassVar[dict[str, Any]] = {"gradient_handlers": [{"use": "broken.twice"}]}

    with pytest.raises(AssertionError, match=r"differ by more than 1e-10, the worst first\n  embed"):
        BrokenTies().test_tied_weight_matches_one_process(ranks, texts)


# -- links -------------------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "test", "arguments", "message"),
    [
        ("reusing", "received_tensors_equal_sent", ("a wave",), "a received and kept tensor changed"),
        ("disorderly", "received_tensors_equal_sent", ("a wave",), r"forward of F\d.\d: received .*, not "),
        ("rigid", "received_tensors_equal_sent", ("a wave",), r"received .*\(\d, 3\).*, not .*\(\d, 3\)"),
        ("late", "received_tensors_equal_sent", ("a wave",), "tensor 0 was received as .*77"),
        ("deaf", "differing_walks_are_reported_on_both_stages", (), "received .*, not"),
        pytest.param("patient", "abort_does_not_wait", (), "Timed out", marks=pytest.mark.campaign),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_link_bug_is_reported(ranks: Callable[..., Ranks], name: str, test: str, arguments: Any, message: str) -> None:
    class BrokenLink(StageLinkContract):
        link: ClassVar[dict[str, Any]] = {"use": f"broken.{name}"}
        abort_timeout_s: ClassVar[float] = 1.0

    with pytest.raises((AssertionError, RunError), match=f"(?s){message}"):
        getattr(BrokenLink(), f"test_{test}")(ranks, *arguments)


# -- the plan of a full pipeline ----------------------------------------------------------------------------------------


def test_plan_uses_parts_of_schedule_record_and_only_link(texts: Path) -> None:
    changes = {"model__num_layers": 8, "batch__micro_size": 1, "pipeline": {"use": "wave.hanayo"}}
    plan = plan_from_dict(small_plan(parallel={"dp": 1, "pp": 4}, **changes), texts)
    assert "pp" not in plan.plugins
    assert plan.link is not None
    assert plan.partition is not None
    assert (plan.link.name, plan.partition.name) == ("wave.link", "wave.even")
    assert [handler.name for handler in plan.gradient_handlers] == ["wave.ties"]
    assert check_plan(plan, 4) == []

"""A pipeline of somebody else's, beside core alone: its schedule, link and ties hold their contracts, and it is planned,
checked, and trained as plain PyTorch; parts that are broken each fail in the test that is meant for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from sley_core.actions.action import Placement
from sley_core.errors import PlanError, RunError
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict
from sley_core.plan.plan import Plan
from sley_testing.link_contract import StageLinkContract
from sley_testing.ranks import Ranks
from sley_testing.runs import assert_by_hand, record
from sley_testing.schedule_contract import ScheduleContract, TieContract

pytestmark = pytest.mark.usefixtures("installed")

WITHOUT_RANKS = [name for name in vars(ScheduleContract) if name.startswith("test_") and "two_stages" not in name]


class TestHanayo(ScheduleContract):
    pipeline: ClassVar[dict[str, Any]] = {"use": "wave.hanayo", "waves": 1}

    def max_micro_batches(self, stage: int, stages: int, micros: int) -> int:
        return 2 * min(stages, micros)


@pytest.mark.campaign
class TestTwoWaves(ScheduleContract):
    pipeline: ClassVar[dict[str, Any]] = {"use": "wave.hanayo", "waves": 2}

    def max_micro_batches(self, stage: int, stages: int, micros: int) -> int:
        return 4 * min(stages, micros)


class OneByOne(ScheduleContract):
    """The claim of a schedule that ends each microbatch before the next one begins."""

    def max_micro_batches(self, stage: int, stages: int, micros: int) -> int:
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
        ("blocked", "test_lists_complete_at_any_size", "schedule-deadlock"),
        ("careless", "test_each_micro_batch_visits_each_chunk_once", r"\('F', 1\).*not FB or FIW"),
        ("greedy", "test_peak_equals_max_micro_batches", "holds .*, but `max_micro_batches` is 1"),
        ("forgetful", "test_lists_are_deterministic", "two calls return different lists"),
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
        Torn().test_tied_weight_matches_one_process(ranks, texts)


# -- links -------------------------------------------------------------------------------------------------------------

ORDER = "test_received_tensors_equal_sent"
LENGTHS = "test_micro_batches_of_different_lengths"
KEPT = "test_received_tensors_stay_unchanged_while_referenced"
PEER = "test_differing_walks_are_reported_on_both_stages"
ABORT = "test_abort_does_not_wait"


class TestWaveLink(StageLinkContract):
    link: ClassVar[dict[str, Any]] = {"use": "wave.link"}
    num_walks: ClassVar[int] = 2


@pytest.mark.campaign
class TestWaveLinkOnMoreWalks(TestWaveLink):
    num_walks: ClassVar[int] = 8


@pytest.mark.parametrize(
    ("name", "test", "arguments", "words"),
    [
        ("reusing", KEPT, ("two stages",), "a received and kept tensor changed"),
        ("disorderly", ORDER, ("a wave",), "forward of F0.* was received as"),
        ("rigid", LENGTHS, ("two stages",), r"received .*\(5, 3\).*, not .*\(7, 3\)"),
        ("late", ORDER, ("two stages",), "tensor 0 was received as .*77"),
        ("deaf", PEER, ([(3, 3), (3, 3, 3)],), "received .*, not"),
        ("patient", ABORT, (), "Timed out"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_link_fails(ranks: Callable[..., Ranks], name: str, test: str, arguments: Any, words: str) -> None:
    class Broken(StageLinkContract):
        link: ClassVar[dict[str, Any]] = {"use": f"broken.{name}"}

    with pytest.raises((AssertionError, RunError), match=f"(?s){words}"):
        getattr(Broken(), test)(ranks, *arguments)


# -- the whole pipeline ------------------------------------------------------------------------------------------------

OWN = Path(__file__).parent / "own"


def tables(pp: int, waves: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "run": {"name": "waves", "steps": 3, "device": "cpu", "seed": 3},
        "model": {"factory": "wave_model:layers"},
        "data": {"factory": "wave_model:Rows"},
        "batch": {"global_size": 8, "micro_size": 2},
        "optimizer": {"use": "core.sgd", "lr": 0.1},
        "precision": {"compute": "fp64"},
        "parallel": {"dp": 1, "pp": pp},
        "pipeline": {"use": "wave.hanayo", "waves": waves},
        **more,
    }


def plan_of(**changes: Any) -> Plan:
    return plan_from_dict(tables(**changes), OWN)


def test_a_plan_takes_what_the_schedule_s_record_names_and_the_only_link() -> None:
    plan = plan_of(pp=4, waves=1)
    assert list(plan.plugins) == ["core", "wave"]
    assert plan.link is not None
    assert plan.partition is not None
    assert (plan.link.name, plan.partition.name) == ("wave.link", "wave.even")
    assert [handler.name for handler in plan.gradient_handlers] == ["wave.ties"]
    assert check_plan(plan, 4) == []


def test_a_placement_that_cannot_be_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import sley_wave.hanayo

    monkeypatch.setattr(sley_wave.hanayo, "wave", lambda stages, chunks: Placement((0, 1, 2, 4) * 2))
    (found,) = check_plan(plan_of(pp=4), 4)
    assert (found.code, found.path) == ("placement-wrong", ("pipeline", "use"))
    assert "has no chunk on stage 3" in found.message


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (2, {"pp": 2, "waves": 2}),
        (4, {"pp": 4, "waves": 1}),
        (4, {"pp": 2, "parallel": {"dp": 2, "pp": 2}, "batch": {"global_size": 8, "micro_size": 2}}),
    ],
    ids=["two stages, two waves", "four stages", "two replicas"],
)
def test_trained_in_waves_it_is_the_loop_by_hand(ranks: Callable[..., Ranks], size: int, changes: dict[str, Any]) -> None:
    """Loss, norm, gradients and weights of two steps, with weights that stages share."""
    from wave_model import Rows, layers

    rows = Rows(None)
    made = [[rows[8 * step + at] for at in range(8)] for step in range(2)]
    batches = [{name: torch.stack([row[name] for row in batch]) for name in batch[0]} for batch in made]
    layouts = ranks(size, 120)(record, tables(**changes), 2, folder=OWN, batches=batches)
    first = {name: value for layout in layouts for name, value in layout.first.items()}
    names = {name for layout in layouts for name in layout.gradients[0]}
    assert names == {"embed.weight", *(f"blocks.{at}.weight" for at in range(7)), *(f"blocks.{at}.bias" for at in range(6))}
    for layout in layouts:
        by_hand = partial(torch.optim.SGD, lr=0.1)
        assert_by_hand(layout, layers(Rows.info), batches, by_hand, micro_size=1, first=first)

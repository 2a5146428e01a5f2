"""`verify --plain` compares with torch's own loop over the same layers, and names what a plain loop does not mind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import RunError
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import Tables, small_plan
from sley_testing.verify.findings import SeenHabit, differences, in_words, read
from sley_testing.verify.measure import check_complete, compare, limits
from sley_testing.verify.plain import keep_plain
from train_cli.main import main
from train_cli.one_process import in_layout, in_one_process

OWN = Path(__file__).parent / "own"

NAMED = {
    "Numpy": ("middle", "draws from numpy"),
    "Generator": ("middle", "draws from random's Random of its own"),
    "Unseeded": ("middle", "no seed reaches"),
    "Parts": ("middle", "`unsafe_split`"),
    "Attribute": ("middle.largest", "a state that the forward changes"),
    "Weight": ("middle.inner.weight", "is written by the forward"),
    "Buffer": ("middle.seen", "is written by the forward"),
    "Field": ("labels", "a field of the batch"),
    "Hook": ("plain_habits.py:", "`clamp_`"),
    "Assigned": ("middle.inner.weight", "by an assignment in a backward"),
    "Evaluated": ("middle", "was in evaluation mode"),
    "InPlace": ("middle", "writes on its input in place"),
    "Dict": ("middle", "puts something else into the dict"),
}


@pytest.fixture(autouse=True)
def _own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(OWN)


def tables(habit: str, **changes: Any) -> Tables:
    model = {"factory": "plain_habits:model", "options": {"habit": habit}}
    return small_plan(**{"precision__compute": "fp32", "parallel": {"dp": 1}, "model": model, **changes})


def looked(given: Tables, texts: Path, folder: Path, steps: int = 1) -> list[SeenHabit]:
    plan = plan_from_dict(given, texts)
    habits: list[SeenHabit] = []
    with assemble(in_one_process(plan), World.alone("cpu")) as run:
        keep_plain(run, steps, folder, habits)
    return habits


def on_a_rank(given: Tables, texts: Path, steps: int, folder: Path) -> None:
    with World.join("cpu") as world, assemble(in_layout(plan_from_dict(given, texts)), world) as run:
        compare(run, steps, folder)


@pytest.mark.parametrize("habit", NAMED)
def test_a_habit_is_named_with_its_place(texts: Path, tmp_path: Path, habit: str) -> None:
    where, what = NAMED[habit]
    found = looked(tables(habit), texts, tmp_path)
    assert any(one.where.startswith(where) and what in one.what for one in found), found


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("model", ["Indexed", "Recomputed", "Rounded"])
def test_what_torch_does_by_itself_is_no_habit(texts: Path, tmp_path: Path, model: str, compute: str) -> None:
    assert looked(tables(model, precision__compute=compute), texts, tmp_path) == []


def test_the_test_kit_is_asked_for_by_name(
    plan: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("train_cli.main.find_spec", lambda _: None)
    assert main(["verify", str(plan)]) != 0
    assert "`train-cli verify` is part of sley-testing, which is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("more", [{}, {"precision__compute": "bf16"}, {"activations": {"use": "core.recompute"}}])
def test_a_model_without_habits_has_none(texts: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    assert looked(tables("Plain", **more), texts, tmp_path) == []
    assert looked(small_plan(precision__compute="fp32", parallel={"dp": 1}), texts, tmp_path) == []


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("habit", "more"),
    [
        ("Numpy", {"parallel": {"dp": 2}}),
        ("Plain", {"parallel": {"dp": 2}, "precision__compute": "bf16", "optimizer__clip_norm": 0.05}),
        ("Generator", {"parallel": {"dp": 1, "pp": 2}, "pipeline": {"use": "pp.one_f_one_b"}}),
        ("Evaluated", {"parallel": {"dp": 2}, "activations": {"use": "core.recompute"}}),
        ("Hook", {"parallel": {"dp": 2}, "learning_rate": {"use": "core.cosine", "warmup_steps": 2}}),
    ],
)
def test_layouts_equal_the_loop(ranks: Any, texts: Path, tmp_path: Path, habit: str, more: dict[str, Any]) -> None:
    given = tables(habit, **more)
    looked(given, texts, tmp_path, steps=3)
    plan = plan_from_dict(given, texts)
    ranks(plan.world(), 120)(on_a_rank, given, texts, 3, tmp_path)
    found, allowed = read(tmp_path, plan.world()), limits(plan, is_plain=True)
    check_complete(found, tmp_path)
    assert not differences(found, allowed), "\n".join(in_words(found, allowed, 3, is_plain=True))


def test_a_loop_that_fails_is_told_with_its_layer(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"layer `middle` \(Fails\) fails in step 1 of a plain loop, too: ValueError: no 8"):
        looked(tables("Fails"), texts, tmp_path)

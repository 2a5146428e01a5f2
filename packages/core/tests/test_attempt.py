"""Whose steps a run has, and whose checkpoints it may resume from."""

from __future__ import annotations

import random
from importlib import import_module
from pathlib import Path

import pytest

from sley_core.assemble import assemble
from sley_core.attempt import (
    Attempt,
    AttemptStart,
    count_common_steps,
    new_attempt,
    read_attempt,
    resume_attempt,
    write_attempt,
)
from sley_core.comm.world import World
from sley_core.errors import PluginError, RunError, UsageError
from sley_core.plan.load import plan_from_dict
from sley_core.plan.loader import Loader
from sley_core.run import Run
from sley_testing.plans import small_plan

A, B, C = AttemptStart("a", 0), AttemptStart("b", 10), AttemptStart("c", 4)


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [((A,), (A, B), 10), ((A, C), (A, B), 4), ((A, C), (A, C, B), 10), ((A,), (B,), 0), ((AttemptStart("a", 3),), (A,), 0)],
)
def test_the_steps_that_two_lineages_share(one, other, common):
    assert count_common_steps(one, other) == count_common_steps(other, one) == common


@pytest.mark.parametrize("seed", range(5))
def test_what_an_attempt_has_taken_is_what_a_list_of_its_steps_says(seed):
    """Against the naive record: the attempt of each step that the folder and each checkpoint has."""
    drawn = random.Random(seed)
    attempt = new_attempt()
    taken: list[str] = []
    saved: list[tuple[tuple[AttemptStart, ...], list[str]]] = []
    for _ in range(30):
        taken += [attempt.id] * drawn.randrange(4)
        saved.append((attempt.lineage, list(taken)))
        lineage, steps = drawn.choice(saved)
        assert attempt.shares_steps(lineage, len(steps)) == (taken[: len(steps)] == steps or not steps)
        assert attempt.is_writer_of(lineage), "all of them are of one run"
        assert min(len(steps), count_common_steps(attempt.lineage, lineage)) == _same(taken, steps), "rows that stay"
        if steps:
            assert attempt.includes_steps(steps[-1], len(steps)) == (taken[: len(steps)] == steps)
        if drawn.random() < 0.5 and steps:
            attempt = resume_attempt(attempt, lineage, len(steps), "given", "path")
            taken = list(steps)
    assert not attempt.is_writer_of(new_attempt().lineage)


def _same(one, other):
    return next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other)))


def test_a_checkpoint_of_another_run_begins_a_lineage_of_its_own():
    found = resume_attempt(new_attempt(), (A, B), 14, "there", "/there/step-14")
    assert [start.step for start in found.lineage] == [14]
    assert (found.given, found.origin, found.left, found.saved) == ("there", "/there/step-14", (), -1)
    again = resume_attempt(found, (A, B), 14, "", "/there/step-14")
    assert (again.given, again.origin, again.left) == ("there", "/there/step-14", (found.id,))


def test_the_record_comes_back_and_a_damaged_one_is_an_error(tmp_path):
    assert read_attempt(tmp_path) is None
    attempt = Attempt((A, B), ("c",), "given", "origin", 12, "77")
    write_attempt(tmp_path, attempt)
    assert read_attempt(tmp_path) == attempt
    for text in ("", "[]", "{}", '{"lineage": [], "left": []}', '{"lineage": [["a"]], "left": []}'):
        (tmp_path / "attempt.json").write_text(text, "utf-8")
        with pytest.raises(RunError, match=r"error\[attempt\]"):
            read_attempt(tmp_path)


def loader_without() -> Loader:
    """Returns a loader of what the small plan names, where no checkpointer is installed."""
    return Loader({name: import_module(f"sley_{name}.plugin") for name in ("models", "data")})


def bare(texts: Path, folder: Path | None = None) -> Run:
    """Returns a run of the small plan where no checkpointer is installed."""
    plan = plan_from_dict(small_plan(), texts, loader=loader_without())
    return assemble(plan, World.alone("cpu"), folder=folder)


def test_a_save_and_a_load_say_what_to_install(texts, tmp_path):
    with bare(texts) as run:
        with pytest.raises(PluginError, match="packages/checkpoint"):
            run.save_checkpoint(tmp_path / "saved")
        with pytest.raises(PluginError, match="packages/checkpoint"):
            run.load_checkpoint(tmp_path / "saved")


def test_auto_begins_a_run_that_has_done_nothing_and_refuses_another(texts, tmp_path):
    with bare(texts, tmp_path) as run:
        assert run.load_checkpoint("auto") is None
        run.train()
    with bare(texts, tmp_path) as run:
        with pytest.raises(UsageError, match=r"never-anew.*rows up to step 3"):
            run.load_checkpoint("auto")
        assert run.load_checkpoint("auto", allow_fresh_start=True) is None
        run.step()


def test_auto_refuses_a_run_that_writes_no_rows(texts, tmp_path):
    """No one knows how many steps it has taken."""
    plan = plan_from_dict(small_plan(metrics=[]), texts)
    with assemble(plan, World.alone("cpu"), folder=tmp_path) as run:
        assert run.load_checkpoint("auto") is None
        run.step()
    refused = pytest.raises(UsageError, match=r"never-anew.*an attempt without rows in metrics.jsonl")
    with assemble(plan, World.alone("cpu"), folder=tmp_path) as run, refused:
        run.load_checkpoint("auto")


def test_auto_asks_for_what_read_the_checkpoints_of_the_run(texts, tmp_path):
    with assemble(plan_from_dict(small_plan(), texts), World.alone("cpu"), folder=tmp_path) as run:
        run.step()
        run.save_checkpoint()
    with bare(texts, tmp_path) as run, pytest.raises(PluginError, match="packages/checkpoint"):
        run.load_checkpoint("auto", allow_fresh_start=True)

"""Whose steps a run has, and whose checkpoints it may resume from."""

import random
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from sley_core.comm.world import World
from sley_core.errors import PluginError, RunError, UsageError
from sley_core.plan.load import plan_from_dict
from sley_core.plan.loader import PluginLoader
from sley_core.run_folder import (
    Attempt,
    AttemptStart,
    count_common_steps,
    create_attempt,
    read_attempt,
    resume_attempt,
    write_attempt,
)
from sley_testing.plans import small_plan
from sley_trainer.assemble import assemble
from sley_trainer.run import Run

A, B = AttemptStart("a", 0), AttemptStart("b", 10)


@pytest.mark.parametrize("seed", range(5))
def test_what_an_attempt_has_taken_is_what_a_list_of_its_steps_says(seed):
    """Against the naive record: the attempt of each step that the folder and each checkpoint has."""
    drawn = random.Random(seed)
    attempt = create_attempt()
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
    assert not attempt.is_writer_of(create_attempt().lineage)


def _same(one, other):
    return next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other)))


def test_a_checkpoint_of_another_run_begins_a_lineage_of_its_own():
    found = resume_attempt(create_attempt(), (A, B), 14, "there", "/there/step-14")
    assert [start.step for start in found.lineage] == [14]
    assert (found.requested_path, found.loaded_path) == ("there", "/there/step-14")
    assert (found.abandoned_ids, found.saved_step) == ((), -1)
    again = resume_attempt(found, (A, B), 14, "", "/there/step-14")
    assert (again.requested_path, again.loaded_path, again.abandoned_ids) == ("there", "/there/step-14", (found.id,))


def test_the_record_comes_back_and_a_damaged_one_is_an_error(tmp_path):
    assert read_attempt(tmp_path) is None
    attempt = Attempt((A, B), ("c",), "given", "origin", 12, "77")
    write_attempt(tmp_path, attempt)
    assert read_attempt(tmp_path) == attempt
    for text in ("", "[]", "{}", '{"lineage": [], "abandoned_ids": []}', '{"lineage": [["a"]], "abandoned_ids": []}'):
        (tmp_path / "attempt.json").write_text(text, "utf-8")
        with pytest.raises(RunError, match=r"error\[attempt\]"):
            read_attempt(tmp_path)


def assemble_small(
    texts: Path, folder: Path | None = None, *, packages: tuple[str, ...] = ("models", "data"), **changes: Any
) -> Run:
    """Returns a run of the small plan where only `packages` are installed."""
    loader = PluginLoader({name: import_module(f"sley_{name}.plugin") for name in packages})
    return assemble(plan_from_dict(small_plan(**changes), texts, loader=loader), World.alone("cpu"), folder=folder)


def test_errors_name_the_package_of_the_checkpointer(texts, tmp_path):
    with assemble_small(texts) as run:
        for call in (run.save_checkpoint, run.load_checkpoint):
            with pytest.raises(PluginError, match="packages/checkpoint"):
                call(tmp_path / "saved")
    with assemble_small(texts, tmp_path, packages=("models", "data", "checkpoint")) as run:
        run.step()
        run.save_checkpoint()
    with assemble_small(texts, tmp_path) as run, pytest.raises(PluginError, match="packages/checkpoint"):
        run.load_checkpoint("auto", allow_fresh_start=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({}, "rows up to step 1"), ({"metrics": []}, "an attempt without rows in metrics.jsonl")],  # with unknown steps
)
def test_auto_starts_a_new_run_and_refuses_one_with_steps(texts, tmp_path, changes, words):
    with assemble_small(texts, tmp_path, **changes) as run:
        assert run.load_checkpoint("auto") is None
        run.step()
    with assemble_small(texts, tmp_path, **changes) as run:
        with pytest.raises(UsageError, match=f"never-anew.*{words}"):
            run.load_checkpoint("auto")
        assert run.load_checkpoint("auto", allow_fresh_start=True) is None
        run.step()

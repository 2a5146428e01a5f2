"""Runs that go on from a checkpoint: what is told, what is refused, and that the numbers are those of a run in one go."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from acting_model import doing

pytestmark = pytest.mark.timeout(180)

Cli = Callable[..., Any]
Start = Callable[..., Any]

ALONE = ("parallel.dp=1", "run.steps=6")
EVERY = 'checkpoint={every_steps=2, mode="sync"}'
EVERY_KEPT = 'checkpoint={every_steps=2, mode="sync", keep=9}'


def rows(folder: Path, name: str = "small") -> list[dict[str, float]]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text("utf-8").splitlines()
    return [{key: json.loads(line)[key] for key in ("step", "loss", "grad_norm", "lr")} for line in lines]


@pytest.fixture
def in_one_go(cli: Cli, plan: Path, folder: Path) -> list[dict[str, float]]:
    """The rows of the same plan, under another name, that nobody disturbed."""
    result = cli("run", plan, changes=[*ALONE, "run.name='whole'"])
    assert result.code == 0, result.err
    return rows(folder, "whole")


def test_auto_goes_on_with_the_numbers_of_a_run_in_one_go(cli: Cli, plan: Path, folder: Path, in_one_go: Any) -> None:
    """A learning rate that knows of all steps makes the first part end early; rows are there once."""
    changes = [*ALONE, EVERY]
    first = cli("run", plan, "--resume", "auto", changes=[*changes, "run.steps=5", "learning_rate.use='core.constant'"])
    assert first.code == 0, first.err
    assert "no checkpoint yet: it begins at the first step" in first.err
    assert len(rows(folder)) == 5
    again = cli("run", plan, "--resume", "auto", changes=[*changes, "learning_rate.use='core.constant'"])
    assert again.code == 0, again.err
    assert f"going on after step 5 of 6, from {folder / 'runs/small/checkpoints/step-00000005'}" in again.err
    assert "the plan has changed since: run.steps: 5 -> 6" in again.err
    assert rows(folder) == in_one_go
    summary = json.loads((folder / "runs/small/summary.json").read_text("utf-8"))
    assert (summary["steps"], summary["samples"]) == (6, 24)


def test_another_layout_is_told_and_another_model_is_refused(cli: Cli, plan: Path, folder: Path) -> None:
    first = cli("run", plan, changes=[*ALONE, EVERY, "run.steps=2"])
    assert first.code == 0, first.err
    refused = cli("run", plan, "--resume", "auto", changes=[*ALONE, EVERY, "model.hidden=32", "data.sequence=8"])
    assert refused.code == 3, refused.err
    assert "resume-differs" in refused.err
    assert "`model.hidden = 16`, the plan has 32" in refused.err
    assert "`data.sequence = 16`, the plan has 8" in refused.err
    assert len(rows(folder)) == 2, "nothing was touched"
    other = cli("run", plan, "--resume", "auto", changes=[*ALONE, EVERY, "batch.micro_size=2"])
    assert other.code == 0, other.err
    assert "the plan has changed since: batch.micro_size: 1 -> 2" in other.err


def test_a_path_begins_a_run_of_another_name(cli: Cli, plan: Path, folder: Path, in_one_go: Any) -> None:
    assert cli("run", plan, changes=[*ALONE, EVERY]).code == 0
    path = folder / "runs/small/checkpoints/step-00000004"
    taken = cli("run", plan, "--resume", path, changes=[*ALONE, "run.name='whole'"])
    assert taken.code != 0
    assert "exists already" in taken.err
    other = cli("run", plan, "--resume", path, changes=[*ALONE, "run.name='other'"])
    assert other.code == 0, other.err
    assert rows(folder, "other") == in_one_go[4:]


def test_a_run_that_began_at_a_path_goes_on_from_its_own(cli: Cli, plan: Path, folder: Path, in_one_go: Any) -> None:
    """By `auto`, and where it is started again with the path still in its command: from its newest, or from the path while it
    has none.
    """
    assert cli("run", plan, changes=[*ALONE, EVERY_KEPT]).code == 0
    path = folder / "runs/small/checkpoints/step-00000002"
    changes = [*ALONE, "run.name='other'", "learning_rate.use='core.constant'"]
    assert cli("run", plan, "--resume", path, changes=[*changes, "run.steps=3"]).code == 0
    again = cli("run", plan, "--resume", "auto", changes=[*changes, "run.steps=5", EVERY])
    assert again.code == 0, again.err
    assert f"going on after step 2 of 5, from {path}" in again.err
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_RESTART_COUNT", "1")
        again = cli("run", plan, "--resume", path, changes=[*changes, EVERY])
    assert again.code == 0, again.err
    assert f"going on after step 5 of 6, from {folder / 'runs/other/checkpoints/step-00000005'}" in again.err
    assert rows(folder, "other") == in_one_go[2:]


@pytest.mark.parametrize("is_noted", [True, False], ids=["after it had loaded", "before it had loaded"])
def test_a_run_that_went_back_does_not_go_on_from_its_earlier_try(
    cli: Cli, plan: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *, is_noted: bool
) -> None:
    """Its checkpoints of before are newer by their steps, and are not what it has come to."""
    assert cli("run", plan, changes=[*ALONE, EVERY_KEPT]).code == 0
    own = folder / "runs/small/checkpoints"
    back = own / "step-00000002"
    if is_noted:
        assert (
            cli(
                "run", plan, "--resume", back, changes=[*ALONE, "run.steps=3", "learning_rate.use='core.constant'"]
            ).code
            == 0
        )
        noted = (folder / "runs/small/attempt.json").read_text("utf-8")
        assert cli("run", plan, "--resume", own / "step-00000099", changes=ALONE).code != 0
        assert (folder / "runs/small/attempt.json").read_text("utf-8") == noted, "a path that is none changes nothing"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    saves = 'checkpoint={every_steps=3, keep=1, mode="sync"}'
    again = cli(
        "run", plan, "--resume", back, changes=[*ALONE, "run.steps=5", saves, "learning_rate.use='core.constant'"]
    )
    assert again.code == 0, again.err
    assert f"going on after step 2 of 5, from {back}" in again.err
    assert [path.name for path in own.iterdir()] == ["step-00000005-1"], "what is kept is what was saved last"
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4, 5]


def test_a_damaged_checkpoint_is_passed_over_and_named(cli: Cli, plan: Path, folder: Path) -> None:
    assert cli("run", plan, changes=[*ALONE, EVERY]).code == 0
    (newest,) = (folder / "runs/small/checkpoints/step-00000006").glob("*.safetensors")
    with newest.open("r+b") as file:
        file.seek(-3, 2)
        file.write(b"\xff\x00\xff")
    again = cli("run", plan, "--resume", "auto", changes=[*ALONE, EVERY, "run.steps=7"])
    assert again.code == 0, again.err
    assert "passed over " in again.err
    assert newest.name in again.err
    assert "going on after step 4 of 7" in again.err
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4, 5, 6, 7]


def test_both_options_contradict_each_other(cli: Cli, plan: Path) -> None:
    result = cli("run", plan, "--resume", "auto", "--overwrite", changes=ALONE)
    assert result.code == 2
    assert "`--resume` goes on with a run and `--overwrite` deletes it" in result.err


def test_a_missing_checkpoint_is_named_before_anything_is_made(cli: Cli, plan: Path, folder: Path) -> None:
    result = cli("run", plan, "--resume", folder / "nowhere", changes=ALONE)
    assert result.code == 2
    assert "no-checkpoint" in result.err
    assert str(folder / "nowhere") in result.err
    assert not (folder / "runs").exists()


def test_a_path_that_is_none_leads_to_the_checkpoints_near_it(cli: Cli, plan: Path, folder: Path) -> None:
    assert cli("run", plan, changes=[*ALONE, EVERY]).code == 0
    other = [*ALONE, "run.name='other'"]
    of_run = cli("run", plan, "--resume", "runs/small", changes=other)
    assert "those of that run are in `runs/small/checkpoints`" in of_run.err
    gone = cli("run", plan, "--resume", "runs/small/checkpoints/step-00000003", changes=other)
    assert "beside it there are `step-00000006`, `step-00000004`" in gone.err
    assert (of_run.code, gone.code) == (2, 2)


def test_a_finished_run_without_a_checkpoint_is_not_begun_again(cli: Cli, plan: Path, folder: Path) -> None:
    """`--resume auto` began at the first step, over metrics and weights of the run that was to go on."""
    assert cli("run", plan, changes=ALONE).code == 0
    made = folder / "runs" / "small"
    before = {path: path.read_bytes() for path in made.rglob("*") if path.is_file()}
    again = cli("run", plan, "--resume", "auto", changes=[*ALONE, "run.steps=8"])
    assert again.code == 2, again.err
    assert "has rows up to step 6 and final weights, but" in again.err
    assert "has no checkpoint of it; it has saved none" in again.err
    unasked = cli("run", plan, changes=ALONE)
    assert "hint: `--overwrite` replaces it" in unasked.err, "nothing can go on here"
    assert {path: path.read_bytes() for path in made.rglob("*") if path.is_file()} == before


def test_a_start_that_is_refused_is_no_failure_of_the_run(start: Start, cli: Cli, plan: Path) -> None:
    """`doctor` told of a finished run that its rank had left with exit code 3, as if it had been killed."""
    changes = ["run.steps=2", 'checkpoint={mode="sync"}']
    assert start("run", plan, changes=changes).finish().code == 0
    refused = start("run", plan, "--resume", "auto", changes=[*changes, "run.steps=4", "run.seed=7"]).finish()
    assert refused.code == 3, refused.err
    assert "resume-differs" in refused.err
    assert (
        "no rank has reported a failure in `runs/small`: the run has ended: finished" in cli("doctor", "runs/small").out
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_run_that_is_asked_to_stop_saves_itself_and_goes_on(
    start: Start, plan: Path, folder: Path, number: int, code: int
) -> None:
    changes = ["parallel.dp=2", "run.steps=1000000", "run.log_every=1", "checkpoint={}"]
    program = start("run", plan, changes=changes)
    program.wait_for("step 3/")
    os.kill(program.process.pid, number)
    result = program.finish(60)
    assert result.code == code, result.err
    done = len(rows(folder))
    assert [path.name for path in (folder / "runs/small/checkpoints").iterdir()] == [f"step-{done:08}"]
    again = start("run", plan, "--resume", "auto", changes=[*changes[:1], f"run.steps={done + 2}", *changes[2:]])
    result = again.finish(60)
    assert result.code == 0, result.err
    assert f"going on after step {done} of {done + 2}" in result.err
    assert [row["step"] for row in rows(folder)] == list(range(1, done + 3))


def test_torchrun_starts_a_run_again_and_it_goes_on_by_itself(start: Start, own_model: Any, folder: Path) -> None:
    path = own_model(doing("self.calls > 6 and rank == 1 and again == '0' and os.kill(os.getpid(), signal.SIGKILL)"))
    changes = ["run.steps=8", 'checkpoint={every_steps=1, mode="sync"}']
    result = start("run", path, torchrun=("--max-restarts", "1"), changes=changes).finish(120)
    assert result.code == 0, result.err
    assert "going on after step" in result.err
    assert [row["step"] for row in rows(folder)] == list(range(1, 9))


def test_a_run_whose_steps_are_all_taken_is_left_as_it_is(cli: Cli, plan: Path, folder: Path) -> None:
    changes = [*ALONE, EVERY]
    assert cli("run", plan, changes=changes).code == 0
    made = folder / "runs" / "small"
    before = {name: (made / name).read_bytes() for name in ("summary.json", "metrics.jsonl", "start.json", "plan.toml")}
    again = cli("run", plan, "--resume", "auto", changes=changes)
    assert again.code == 0, again.err
    assert "nothing is left to do: all " in again.err
    assert {name: (made / name).read_bytes() for name in before} == before

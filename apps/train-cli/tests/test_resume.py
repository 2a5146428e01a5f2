"""Runs that go on from a checkpoint: what is told, what is refused, and that the numbers are those of a run in one go."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from acting_model import doing

from sley_core.metrics import jsonl

pytestmark = pytest.mark.timeout(180)

Cli = Callable[..., Any]
Start = Callable[..., Any]

ALONE = ("parallel.dp=1", "run.steps=6")
EVERY = 'checkpoint={every_steps=2, mode="sync"}'
EVERY_KEPT = 'checkpoint={every_steps=2, mode="sync", keep=9}'


def rows(folder: Path, name: str = "small") -> list[dict[str, float]]:
    return [{key: row[key] for key in ("step", "loss", "grad_norm", "lr")} for row in jsonl.rows(folder / "runs" / name)]


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
    assert "there is no checkpoint yet, so the run starts at step 1" in first.err
    assert len(rows(folder)) == 5
    again = cli("run", plan, "--resume", "auto", changes=[*changes, "learning_rate.use='core.constant'"])
    assert again.code == 0, again.err
    assert f"continuing after step 5 of 6, from {folder / 'runs/small/checkpoints/step-00000005'}" in again.err
    assert "the plan has changed since the checkpoint: run.steps: 5 -> 6" in again.err
    assert "the learning rate is 0.001 in step 5, 0.001 in step 6, 0.001 in step 6" in again.err
    assert rows(folder) == in_one_go
    summary = json.loads((folder / "runs/small/summary.json").read_text("utf-8"))
    assert (summary["steps"], summary["samples"]) == (6, 24)


def test_another_layout_is_told_and_another_model_is_refused(cli: Cli, plan: Path, folder: Path) -> None:
    first = cli("run", plan, changes=[*ALONE, EVERY, "run.steps=2"])
    assert first.code == 0, first.err
    refused = cli("run", plan, "--resume", "auto", changes=[*ALONE, EVERY, "model.hidden=32", "data.sequence=8"])
    assert refused.code == 3, refused.err
    assert "resume-differs" in refused.err
    assert "`model.hidden = 16`, but the plan has 32" in refused.err
    assert "`data.sequence = 16`, but the plan has 8" in refused.err
    assert len(rows(folder)) == 2, "nothing was touched"
    other = cli("run", plan, "--resume", "auto", changes=[*ALONE, EVERY, "batch.micro_size=2"])
    assert other.code == 0, other.err
    assert "the plan has changed since the checkpoint: batch.micro_size: 1 -> 2" in other.err


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
    assert f"continuing after step 2 of 5, from {path}" in again.err
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_RESTART_COUNT", "1")
        again = cli("run", plan, "--resume", path, changes=[*changes, EVERY])
    assert again.code == 0, again.err
    assert f"continuing after step 5 of 6, from {folder / 'runs/other/checkpoints/step-00000005'}" in again.err
    assert rows(folder, "other") == in_one_go[2:]


@pytest.mark.sample(1)
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
            cli("run", plan, "--resume", back, changes=[*ALONE, "run.steps=3", "learning_rate.use='core.constant'"]).code == 0
        )
        noted = (folder / "runs/small/attempt.json").read_text("utf-8")
        assert cli("run", plan, "--resume", own / "step-00000099", changes=ALONE).code != 0
        assert (folder / "runs/small/attempt.json").read_text("utf-8") == noted, "a path that is none changes nothing"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    saves = 'checkpoint={every_steps=3, keep=1, mode="sync"}'
    again = cli("run", plan, "--resume", back, changes=[*ALONE, "run.steps=5", saves, "learning_rate.use='core.constant'"])
    assert again.code == 0, again.err
    assert f"continuing after step 2 of 5, from {back}" in again.err
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
    assert "skipped " in again.err
    assert newest.name in again.err
    assert "continuing after step 4 of 7" in again.err
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4, 5, 6, 7]


def test_a_path_that_is_none_leads_to_the_checkpoints_near_it(cli: Cli, plan: Path, folder: Path) -> None:
    nowhere = cli("run", plan, "--resume", folder / "nowhere", changes=ALONE)
    assert (nowhere.code, "no-checkpoint" in nowhere.err, (folder / "runs").exists()) == (2, True, False)
    assert cli("run", plan, "--resume", "auto", "--overwrite", changes=ALONE).code == 2
    assert cli("run", plan, changes=[*ALONE, EVERY]).code == 0
    other = [*ALONE, "run.name='other'"]
    of_run = cli("run", plan, "--resume", "runs/small", changes=other)
    assert "use `runs/small/checkpoints`, the checkpoints of that run" in of_run.err
    gone = cli("run", plan, "--resume", "runs/small/checkpoints/step-00000003", changes=other)
    assert "use a checkpoint of the parent folder: `step-00000006`, `step-00000004`" in gone.err
    assert (of_run.code, gone.code) == (2, 2)


def test_a_run_that_is_warned_saves_itself_and_goes_on(start: Start, cli: Cli, plan: Path, folder: Path) -> None:
    """By the signal that a batch system sends some time before it ends a job."""
    changes = ["run.log_every=1", "checkpoint={}"]
    program = start("run", plan, changes=["run.steps=1000000", *changes])
    program.wait_for("step 3/")
    os.kill(program.process.pid, signal.SIGUSR1)
    result = program.finish(60)
    assert result.code == 138, result.err
    done = len(rows(folder))
    assert [path.name for path in (folder / "runs/small/checkpoints").iterdir()] == [f"step-{done:08}"]
    again = cli("run", plan, "--resume", "auto", changes=["parallel.dp=1", f"run.steps={done + 2}", *changes])
    assert again.code == 0, again.err
    assert f"continuing after step {done} of {done + 2}" in again.err
    assert [row["step"] for row in rows(folder)] == list(range(1, done + 3))


def test_torchrun_starts_a_run_again_which_goes_on_by_itself_and_ends_with_torchrun(
    start: Start, own_model: Any, folder: Path
) -> None:
    path = own_model(doing("self.calls > 6 and rank == 1 and again == '0' and os.kill(os.getpid(), signal.SIGKILL)"))
    changes = ["run.steps=100000", 'checkpoint={every_steps=1, mode="sync"}']
    program = start("run", path, torchrun=("--max-restarts", "1"), changes=changes)
    program.wait_for("continuing after step")
    program.wait_for("step 12/")
    os.kill(program.process.pid, signal.SIGKILL)
    program.finish(15)  # fails if a process is left
    steps = [row["step"] for row in rows(folder)]
    assert steps == list(range(1, len(steps) + 1))
    assert "run-folder" not in program.err


def test_a_run_without_checkpoints_is_never_begun_anew_by_auto(
    cli: Cli, plan: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun, too, which begins it anew where its user has not asked to resume."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "once")
    assert cli("run", plan, changes=[*ALONE, "run.steps=3"]).code == 0
    for count in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        again = cli("run", plan, "--resume", "auto", changes=[*ALONE, "run.steps=5"])
        assert again.code == 2, again.err
        assert "never-anew" in again.err
        assert "has rows up to step 3 and final weights" in again.err
        assert [row["step"] for row in rows(folder)] == [1, 2, 3]
    assert cli("run", plan, changes=[*ALONE, "run.steps=5"]).code == 0
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4, 5]


# -- whose checkpoints -------------------------------------------------------------------------------------------------


def kept_in(folder: Path, name: str, keep: int = 2) -> str:
    return f"checkpoint={{every_steps=2, mode='sync', keep={keep}, folder='{folder / name}'}}"


def test_a_run_that_was_begun_anew_does_not_resume_from_the_one_before(cli: Cli, plan: Path, folder: Path) -> None:
    """Its rows would stand beside the other attempt's weights. A scheduler starts it again, or its user does."""
    changes = [*ALONE, kept_in(folder, "ck")]
    assert cli("run", plan, changes=changes).code == 0
    begun = cli("run", plan, "--overwrite", changes=[*changes, "checkpoint.every_steps=99", "run.steps=3", "optimizer.lr=1e-4"])
    assert begun.code == 0, begun.err
    shutil.rmtree(folder / "ck" / "step-00000003-1")
    again = cli("run", plan, "--resume", "auto", changes=[*changes, "run.steps=8", "optimizer.lr=1e-4"])
    assert again.code == 2, again.err
    assert "never-anew" in again.err
    assert (
        "only checkpoints of other attempts: step-00000006, step-00000004; its newest checkpoint was from step 3" in again.err
    )
    assert [row["step"] for row in rows(folder)] == [1, 2, 3]
    assert sorted(path.name for path in (folder / "ck").iterdir()) == ["step-00000004", "step-00000006"]


def test_two_runs_in_one_folder_of_checkpoints_keep_to_their_own(cli: Cli, plan: Path, folder: Path) -> None:
    changes = [*ALONE, kept_in(folder, "ck")]
    one, other = ["run.folder='one'"], ["run.folder='other'", "optimizer.lr=1e-5"]
    assert cli("run", plan, changes=[*changes, *one]).code == 0
    assert cli("run", plan, changes=[*changes, *other, "run.steps=4"]).code == 0
    again = cli("run", plan, "--resume", "auto", changes=[*changes, *one, "run.steps=8"])
    assert again.code == 0, again.err
    assert f"continuing after step 6 of 8, from {folder / 'ck' / 'step-00000006'}" in again.err
    assert "ignored checkpoints of other attempts: step-00000004-1, step-00000002-1" in again.err
    names = sorted(path.name for path in (folder / "ck").iterdir())
    assert names == ["step-00000002-1", "step-00000004-1", "step-00000006", "step-00000008-1"]


def test_work_is_not_begun_again_where_its_checkpoints_are_gone(cli: Cli, plan: Path, folder: Path) -> None:
    changes = [*ALONE, kept_in(folder, "ck")]
    assert cli("run", plan, changes=changes).code == 0
    (folder / "ck").rename(folder / "elsewhere")
    longer = [*changes, "run.steps=8"]
    gone = cli("run", plan, "--resume", "auto", changes=longer)
    assert gone.code == 2, gone.err
    assert f"rows up to step 6 and final weights, but {folder / 'ck'} has no checkpoint of this run" in gone.err
    assert "; its newest checkpoint was from step 6" in gone.err
    shutil.rmtree(folder / "runs/small")
    unknown = cli("run", plan, "--resume", "auto", changes=[*ALONE, kept_in(folder, "elsewhere")])
    assert unknown.code == 2, unknown.err
    assert "does not show that this run wrote them" in unknown.err


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["a link", "elsewhere", "a URL"])
def test_a_run_goes_back_wherever_its_checkpoints_are(cli: Cli, plan: Path, folder: Path, kind: str) -> None:
    changes = [*ALONE, kept_in(folder, "ck", keep=9)]
    path = str(folder / "ck" / "step-00000002")
    if kind == "a link":
        changes = [*ALONE, EVERY_KEPT]
        path = "runs/small/checkpoints/step-00000002"
    if kind == "a URL":
        pytest.importorskip("fsspec")
        changes = [*ALONE, f"checkpoint={{every_steps=2, mode='sync', keep=9, folder='file://{folder}/ck'}}"]
        path = f"file://{folder}/ck/step-00000002"
    assert cli("run", plan, changes=changes).code == 0
    if kind == "a link":
        (folder / "runs/small/checkpoints").rename(folder / "ck")
        (folder / "runs/small/checkpoints").symlink_to(folder / "ck")
    back = cli("run", plan, "--resume", path, changes=[*changes, "run.steps=4"])
    assert back.code == 0, back.err
    assert "continuing after step 2 of 4" in back.err
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4]
    assert (folder / "ck" / "step-00000004-1").is_dir()


@pytest.mark.parametrize("checkpoint", ["", EVERY], ids=["without", "with checkpoints"])
def test_a_requeued_job_leaves_a_finished_run_as_it_is(
    cli: Cli, plan: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: str
) -> None:
    """The first of several runs of a job: with another exit code the job ended there, each time."""
    changes = [*ALONE, *filter(None, [checkpoint])]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert cli("run", plan, changes=changes).code == 0
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    for options in ([], ["--overwrite"]):
        again = cli("run", plan, *options, changes=changes)
        assert again.code == 0, again.err
        assert "the run has finished all 6 steps" in again.err
    other = cli("run", plan, "--resume", "auto", changes=[*changes, "run.seed=5"])
    assert "resume-differs" in other.err
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert "already exists" in cli("run", plan, changes=changes).err, "another job's run is not this one's"
    assert cli("run", plan, "--overwrite", changes=[*changes, "run.seed=5"]).code == 0


def test_export_and_sample_take_the_newest_weights_and_say_which(cli: Cli, plan: Path, folder: Path) -> None:
    changes = [*ALONE, "checkpoint={every_steps=2, mode='sync', keep=9}"]
    assert cli("run", plan, changes=[*changes, "run.steps=4"]).code == 0
    assert "the weights of step 4 in runs/small/weights" in cli("export", "runs/small", "--out", "one").err
    more = [*changes, "run.steps=8", "run.final_weights='none'"]
    assert cli("run", plan, "--resume", "auto", changes=more).code == 0
    assert "after step 8 of 8" in cli("export", "runs/small", "--out", "two").err
    (folder / "runs").rename(folder / "moved")
    (folder / "corpus.txt").unlink()
    sampled = cli("sample", "moved/small", "--prompt", "the", "--tokens", "2")
    assert sampled.code == 0, sampled.err
    assert f"after step 8 of 8 of the run 'small', from {folder / 'moved/small/checkpoints'}" in sampled.err
    back = cli("run", plan, "--resume", "moved/small/checkpoints/step-00000002", changes=[*more, "run.folder='moved'"])
    assert back.code != 0, "its corpus is gone"
    assert "after step 8 of" in cli("sample", "moved/small", "--prompt", "the", "--tokens", "2").err


PICKLES = Path(__file__).parents[3] / "packages/testing/tests/outsider/own"


@pytest.mark.skipif(not PICKLES.exists(), reason="the other packages' tests are not part of the sdist")
def test_a_checkpointer_of_somebody_elses_resumes_too(
    cli: Cli, plan: Path, folder: Path, in_one_go: Any, plugin_folder: Callable[..., None]
) -> None:
    """It has nothing that reads its checkpoints without a run: an export says so."""
    plugin_folder(PICKLES, pickles="sley_pickles.plugin")
    changes = [*ALONE, 'checkpoint={use="pickles.folder", every_steps=2}', "learning_rate.use='core.constant'"]
    assert cli("run", plan, changes=[*changes, "run.steps=3"]).code == 0
    again = cli("run", plan, "--resume", "auto", changes=[*changes, "run.steps=5"])
    assert "continuing after step 2 of 5" in again.err, again.err
    newest = folder / "runs/small/checkpoints/step-00000004"
    again = cli("run", plan, "--resume", newest, changes=[*changes, "run.final_weights='none'"])
    assert "continuing after step 4 of 6" in again.err, again.err
    assert rows(folder) == in_one_go
    shutil.rmtree(folder / "runs/small/weights")
    assert "no-checkpoint-files" in cli("export", "runs/small", "--out", "out").err

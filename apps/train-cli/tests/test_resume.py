"""Resumed runs have the numbers of an uninterrupted run; messages and refusals of `--resume`."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from acting_model import doing
from started_program import Cli, Result, Start

from sley_core.run_folder import read_rows

pytestmark = pytest.mark.timeout(180)

Resume = Callable[..., Result]

ALONE = ("parallel.dp=1", "batch.global_size=2", "run.steps=6")
CONSTANT = "learning_rate.use='core.constant'"
EVERY = 'checkpoint={every_steps=2, mode="sync"}'
EVERY_KEPT = 'checkpoint={every_steps=2, mode="sync", keep=9}'


def rows(folder: Path, name: str = "small") -> list[dict[str, float]]:
    return [{key: row[key] for key in ("step", "loss", "grad_norm", "lr")} for row in read_rows(folder / "runs" / name)]


@pytest.fixture
def resume(cli: Cli, plan: Path) -> Resume:
    """`resume(changes, path)` runs the plan on one rank with `--resume path`, by default `auto`, and further options."""

    def run(changes: Iterable[str] = (), path: object = "auto", *options: str) -> Result:
        result: Result = cli("run", plan, "--resume", path, *options, changes=[*ALONE, *changes])
        return result

    return run


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs") / "small"


@pytest.fixture
def small(cli: Cli, plan: Path, folder: Path, trained_once: Path) -> Path:
    """The folder of a finished run of six steps, with a checkpoint after every second step."""
    run = folder / "runs" / "small"
    if trained_once.exists():
        shutil.copytree(trained_once, run)
    else:
        cli("run", plan, changes=[*ALONE, EVERY_KEPT]).expect(0)
        shutil.copytree(run, trained_once)
    return run


def test_auto_resumes_with_the_numbers_of_an_uninterrupted_run(resume: Resume, folder: Path, small: Path) -> None:
    changes = [EVERY, CONSTANT, "run.name='other'"]
    resume([*changes, "run.steps=5"]).expect(0, "there is no checkpoint yet, so the run starts at step 1")
    resume([*changes, "model.hidden=32", "data.sequence=8"]).expect(
        3, "resume-differs", "`model.hidden = 16`, but the plan has 32", "`data.sequence = 16`, but the plan has 8"
    )
    assert len(rows(folder, "other")) == 5, "the folder is unchanged"
    resume(changes).expect(
        0,
        f"continuing after step 5 of 6, from {folder / 'runs/other/checkpoints/step-00000005'}",
        "the plan has changed since the checkpoint: run.steps: 5 -> 6",
    )
    assert rows(folder, "other") == rows(folder)
    summary = json.loads((folder / "runs/other/summary.json").read_text("utf-8"))
    assert (summary["steps"], summary["samples"]) == (6, 12)
    resume([*changes, "run.steps=7", "batch.micro_size=2"]).expect(0, "batch.micro_size: 1 -> 2")


def test_a_run_from_a_path_resumes_its_own_checkpoints(resume: Resume, folder: Path, small: Path) -> None:
    """So does a restart with the path still in the command. A run without own checkpoints resumes from the path."""
    path = small / "checkpoints/step-00000002"
    changes = ["run.name='other'", CONSTANT]
    assert resume([*changes, "run.steps=3"], path).code == 0
    resume([*changes, "run.steps=5", EVERY]).expect(0, f"continuing after step 2 of 5, from {path}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_RESTART_COUNT", "1")
        newest = folder / "runs/other/checkpoints/step-00000005"
        resume([*changes, EVERY], path).expect(0, f"continuing after step 5 of 6, from {newest}")
    assert rows(folder, "other") == rows(folder)[2:]


def test_a_run_that_went_back_ignores_later_checkpoints(
    resume: Resume, folder: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later checkpoints belong to the steps that the run has discarded."""
    checkpoints, attempt = small / "checkpoints", small / "attempt.json"
    path = checkpoints / "step-00000002"
    assert resume([CONSTANT, "run.steps=3"], path).code == 0
    text = attempt.read_text("utf-8")
    assert resume((), checkpoints / "step-00000099").code != 0
    assert attempt.read_text("utf-8") == text, "a missing checkpoint changes nothing"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    saves = 'checkpoint={every_steps=3, keep=1, mode="sync"}'
    resume([CONSTANT, "run.steps=5", saves], path).expect(0, f"continuing after step 2 of 5, from {path}")
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000005-1"], "keep = 1"
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4, 5]


def test_a_wrong_path_has_a_hint_and_a_damaged_checkpoint_is_skipped(resume: Resume, folder: Path, small: Path) -> None:
    other = ["run.name='other'"]
    missing = resume(other, folder / "nowhere")
    assert (missing.code, "no-checkpoint" in missing.err, (folder / "runs/other").exists()) == (2, True, False)
    assert resume(other, "auto", "--overwrite").code == 2
    resume(other, "runs/small").expect(2, "such as `runs/NAME/checkpoints`")
    (newest,) = (small / "checkpoints/step-00000006").glob("*.safetensors")
    with newest.open("r+b") as file:
        file.seek(-3, 2)
        file.write(b"\xff\x00\xff")
    resume([EVERY, "run.steps=7"]).expect(0, "skipped ", newest.name, "continuing after step 4 of 7")
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4, 5, 6, 7]


def test_a_warning_signal_saves_the_run(start: Start, plan: Path, resume: Resume, folder: Path) -> None:
    changes = ["run.log_every=1", "checkpoint={}"]
    program = start("run", plan, changes=["run.steps=1000000", "batch.global_size=2", *changes])
    program.wait_for("step 3/")
    os.kill(program.process.pid, signal.SIGUSR1)
    program.finish(60).expect(138)
    num_steps = len(rows(folder))
    assert [path.name for path in (folder / "runs/small/checkpoints").iterdir()] == [f"step-{num_steps:08}"]
    resume([*changes, f"run.steps={num_steps + 2}"]).expect(0, f"continuing after step {num_steps} of {num_steps + 2}")
    assert [row["step"] for row in rows(folder)] == list(range(1, num_steps + 3))


def test_a_run_that_torchrun_restarts_resumes_and_ends_with_torchrun(start: Start, own_model: Any, folder: Path) -> None:
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


def test_auto_never_restarts_a_run_without_checkpoints(
    cli: Cli, plan: Path, resume: Resume, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `--resume`, a restart by torchrun starts over."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "once")
    assert cli("run", plan, changes=[*ALONE, "run.steps=3"]).code == 0
    for count in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        resume(["run.steps=5"]).expect(2, "never-anew", "has rows up to step 3 and final weights")
        assert [row["step"] for row in rows(folder)] == [1, 2, 3]
    assert cli("run", plan, changes=[*ALONE, "run.steps=5"]).code == 0
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4, 5]


# -- checkpoint folders ------------------------------------------------------------------------------------------------


def checkpoints_in(folder: Path, name: str) -> str:
    return f"checkpoint={{every_steps=2, mode='sync', keep=2, folder='{folder / name}'}}"


def test_an_overwritten_run_does_not_resume_from_old_checkpoints(cli: Cli, plan: Path, resume: Resume, folder: Path) -> None:
    changes = [*ALONE, checkpoints_in(folder, "ck")]
    assert cli("run", plan, changes=changes).code == 0
    other = [*changes, "checkpoint.every_steps=99", "run.steps=3", "optimizer.lr=1e-4"]
    assert cli("run", plan, "--overwrite", changes=other).code == 0
    shutil.rmtree(folder / "ck" / "step-00000003-1")
    resume([*changes, "run.steps=8", "optimizer.lr=1e-4"]).expect(
        2,
        "never-anew",
        "only checkpoints of other attempts: step-00000006, step-00000004; its newest checkpoint was from step 3",
    )
    assert [row["step"] for row in rows(folder)] == [1, 2, 3]
    assert sorted(path.name for path in (folder / "ck").iterdir()) == ["step-00000004", "step-00000006"]


def test_runs_that_share_a_checkpoint_folder_use_only_their_own_checkpoints(
    cli: Cli, plan: Path, resume: Resume, folder: Path
) -> None:
    changes = [*ALONE, checkpoints_in(folder, "ck")]
    first, second = ["run.folder='first'"], ["run.folder='second'", "optimizer.lr=1e-5"]
    assert cli("run", plan, changes=[*changes, *first]).code == 0
    assert cli("run", plan, changes=[*changes, *second, "run.steps=4"]).code == 0
    resume([*changes, *first, "run.steps=8"]).expect(
        0,
        f"continuing after step 6 of 8, from {folder / 'ck' / 'step-00000006'}",
        "ignored checkpoints of other attempts: step-00000004-1, step-00000002-1",
    )
    names = sorted(path.name for path in (folder / "ck").iterdir())
    assert names == ["step-00000002-1", "step-00000004-1", "step-00000006", "step-00000008-1"]
    (folder / "ck").rename(folder / "elsewhere")
    resume([*changes, *first, "run.steps=9"]).expect(
        2,
        f"rows up to step 8 and final weights, but {folder / 'ck'} has no checkpoint of this run",
        "; its newest checkpoint was from step 8",
    )
    shutil.rmtree(folder / "first")
    resume([*first, checkpoints_in(folder, "elsewhere")]).expect(2, "only checkpoints of other attempts")


def test_a_run_resumes_from_a_url_and_through_a_link(cli: Cli, plan: Path, resume: Resume, folder: Path) -> None:
    pytest.importorskip("fsspec")
    changes = [*ALONE, f"checkpoint={{every_steps=2, mode='sync', keep=9, folder='file://{folder}/ck'}}"]
    assert cli("run", plan, changes=changes).code == 0
    (folder / "link").symlink_to(folder / "ck")
    for path in (f"file://{folder}/ck", "link"):
        resume([*changes, "run.steps=4"], f"{path}/step-00000002").expect(0, "continuing after step 2 of 4")
        assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4]
    assert (folder / "ck" / "step-00000004-1").is_dir()


def test_a_requeued_job_does_not_change_a_finished_run(
    cli: Cli, plan: Path, resume: Resume, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = [*ALONE, EVERY]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert cli("run", plan, changes=changes).code == 0
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    for options in ([], ["--overwrite"]):
        cli("run", plan, *options, changes=changes).expect(0, "the run has finished all 6 steps")
    assert "resume-differs" in resume([*changes, "run.seed=5"]).err
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert "already exists" in cli("run", plan, changes=changes).err, "the run belongs to another job"
    assert cli("run", plan, "--overwrite", changes=[*changes, "run.seed=5"]).code == 0


def test_export_and_sample_use_the_newest_weights(cli: Cli, resume: Resume, folder: Path, small: Path) -> None:
    assert "the weights of step 6 in runs/small/weights" in cli("export", "runs/small", "--out", "one").err
    longer = [*ALONE, EVERY_KEPT, "run.steps=8", "run.final_weights='none'"]
    assert resume(longer).code == 0
    assert "after step 8 of 8" in cli("export", "runs/small", "--out", "two").err
    (folder / "runs").rename(folder / "moved")
    (folder / "corpus.txt").unlink()
    checkpoints = folder / "moved/small/checkpoints"
    sample = ("sample", "moved/small", "--prompt", "the", "--tokens", "2")
    cli(*sample).expect(0, f"after step 8 of 8 of the run 'small', from {checkpoints}")
    assert resume([*longer, "run.folder='moved'"], checkpoints / "step-00000002").code != 0, "the corpus is missing"
    assert "after step 8 of" in cli(*sample).err


PICKLES = Path(__file__).parents[3] / "packages/testing/tests/outsider/own"


@pytest.mark.skipif(not PICKLES.exists(), reason="the other packages' tests are not part of the sdist")
def test_a_run_with_another_checkpointer_resumes(
    cli: Cli, plan: Path, resume: Resume, folder: Path, small: Path, install_plugins: Callable[..., None]
) -> None:
    """Its record has no reader of checkpoints, so an export refuses them."""
    install_plugins(PICKLES, pickles="sley_pickles.plugin")
    changes = [*ALONE, 'checkpoint={use="pickles.folder", every_steps=2}', CONSTANT, "run.name='other'"]
    assert cli("run", plan, changes=[*changes, "run.steps=3"]).code == 0
    resume([*changes, "run.final_weights='none'"]).expect(0, "continuing after step 2 of 6")
    assert rows(folder, "other") == rows(folder)
    shutil.rmtree(folder / "runs/other/weights")
    assert "no-checkpoint-files" in cli("export", "runs/other", "--out", "out").err

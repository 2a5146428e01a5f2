"""A job that SLURM's own daemons start on this machine: it trains as a local run does, also when it is put back into the queue
on its way, and tasks that srun alone has started are refused.

SLURM is taken from where `.ci/get_slurm FOLDER` has unpacked it: SLEY_SLURM=FOLDER.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slurm_daemons import SlurmDaemons, slurm_root
from started_program import Result

from sley_core.attempt import WEIGHTS
from sley_core.weight_files.read import WeightFiles

Cli = Callable[..., Result]

ROOT = slurm_root()

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.timeout(400),
    pytest.mark.skipif(ROOT is None, reason="SLEY_SLURM does not name a folder with SLURM: .ci/get_slurm makes one"),
]


@pytest.fixture
def slurm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmDaemons]:
    """SLURM, whose jobs find `train-cli`."""
    (folder / "bin").mkdir()
    (folder / "bin/train-cli").write_text(f'#!/bin/sh\nexec {sys.executable} -m train_cli "$@"\n', "utf-8")
    (folder / "bin/train-cli").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/sbin:/usr/bin:/bin")
    assert ROOT is not None
    with SlurmDaemons(ROOT, folder / "slurm") as daemons:
        yield daemons


@pytest.fixture
def submit(slurm: SlurmDaemons, cli: Cli, plan: Path) -> Callable[..., str]:
    """`submit(changes)` gives what `launch` prints for one node to sbatch, and returns the job's number."""

    def give(*changes: str) -> str:
        text = cli("launch", plan, "--on", "slurm", "--nodes", 1, changes=changes).out
        (plan.parent / "job.sbatch").write_text(text, "utf-8")
        return slurm.call("sbatch", "--parsable", "--output=said", "job.sbatch", cwd=plan.parent).strip()

    return give


def said(plan: Path) -> str:
    path = plan.parent / "said"
    return path.read_text("utf-8") if path.exists() else ""


def until(is_so: Callable[[], bool], slurm: SlurmDaemons, plan: Path) -> None:
    limit = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < limit, slurm.call("scontrol", "show", "job") + said(plan)
        time.sleep(0.2)


def state(slurm: SlurmDaemons, job: str) -> str:
    words = slurm.call("scontrol", "show", "job", job).split()
    return next(word.removeprefix("JobState=") for word in words if word.startswith("JobState="))


def steps(plan: Path) -> list[int]:
    path = plan.parent / "runs/small/metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def test_a_job_goes_on_when_it_is_put_back_into_the_queue(
    submit: Callable[..., str], slurm: SlurmDaemons, cli: Cli, plan: Path
) -> None:
    changes = ("run.steps=200", 'checkpoint={every_steps=10, mode="sync"}')
    job = submit(*changes)
    until(lambda: len(steps(plan)) >= 15, slurm, plan)
    slurm.call("scontrol", "requeue", job)
    until(lambda: state(slurm, job) == "PENDING", slurm, plan)
    done = len(steps(plan))
    assert 15 <= done < 200
    slurm.call("scontrol", "update", f"jobid={job}", "starttime=now")  # it waits for two minutes else
    until(lambda: state(slurm, job) == "COMPLETED", slurm, plan)
    assert "going on after step" in said(plan)
    assert steps(plan) == list(range(1, 201))
    assert cli("run", plan, changes=[*changes, "run.name=local"]).code == 0
    local, ours = (WeightFiles(plan.parent / "runs" / name / WEIGHTS) for name in ("local", "small"))
    assert all(local.tensor(name).equal(ours.tensor(name)) for name in local.names)


def test_tasks_that_srun_alone_has_started_are_refused(slurm: SlurmDaemons, plan: Path) -> None:
    told = slurm.call("srun", "--ntasks=2", "train-cli", "run", "plan.toml", check=False, cwd=plan.parent)
    assert told.count("error[no-ranks]: srun has started 2 tasks") == 2
    assert not (plan.parent / "runs").exists()

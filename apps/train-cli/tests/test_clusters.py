"""Jobs of clusters, which go on to the weights of a local run when something has happened on their way.

On two hosts, of which one is cut off: both say so in time, by an error that has a name. With SLURM's own daemons on this host,
which put a job back into the queue; they are taken from where `.ci/get_slurm FOLDER` has unpacked them: SLEY_SLURM=FOLDER.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from slurm_daemons import SlurmDaemons, slurm_root
from started_program import Program, Result
from two_hosts import NAMES, TwoHosts

from sley_core.attempt import WEIGHTS
from sley_core.metrics.jsonl import rows
from sley_core.weight_files.read import WeightFiles

Cli = Callable[..., Result]

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(400)]


def steps(plan: Path) -> list[int]:
    return [int(row["step"]) for row in rows(plan.parent / "runs/small")]


def until(is_so: Callable[[], bool], told: Callable[[], str], limit_s: float = 120) -> None:
    limit = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < limit, told()
        time.sleep(0.1)


def assert_is_like_a_local_run(cli: Cli, plan: Path, *changes: str) -> None:
    assert steps(plan) == list(range(1, NUM_STEPS + 1))
    assert cli("run", plan, changes=[*changes, "run.name=local"]).code == 0
    local, ours = (WeightFiles(plan.parent / "runs" / name / WEIGHTS) for name in ("local", "small"))
    assert all(local.tensor(name).equal(ours.tensor(name)) for name in local.names)


def put_on_path(folder: Path, programs: dict[str, str]) -> str:
    """Writes programs that a job starts. Returns the PATH on which they are."""
    (folder / "bin").mkdir()
    for name, program in programs.items():
        (folder / "bin" / name).write_text(program, "utf-8")
        (folder / "bin" / name).chmod(0o755)
    return f"{folder / 'bin'}:/usr/sbin:/usr/bin:/bin"


NUM_STEPS = 150
SAVES = (f"run.steps={NUM_STEPS}", "checkpoint={every_steps=10, mode='sync'}")
TRAIN_CLI = f'#!/bin/sh\nexec {sys.executable} -m train_cli "$@"\n'

# -- two hosts ---------------------------------------------------------------------------------------------------------

LIMIT_S, TEAR_DOWN_S = 5, 20
"""For an exchange, and for what follows on a machine that is busy."""

LIMITED = (*SAVES, f"limits={{collective_timeout_s={LIMIT_S}, start_timeout_s=60}}")

SRUN = """#!/bin/bash
while [ "${{1#--}}" != "$1" ]; do shift; done
SLURM_PROCID=0 SLURM_LOCALID=0 {first} "$@" & one=$!
SLURM_PROCID=1 SLURM_LOCALID=0 {second} "$@" & other=$!
wait $one; code=$?
wait $other && exit $code
"""
"""Stands for srun: starts a task on each of our hosts, with the variables that SLURM gives it."""


@pytest.fixture
def hosts(folder: Path) -> Iterator[TwoHosts]:
    with ExitStack() as stack:
        try:
            found = stack.enter_context(TwoHosts(folder))
        except OSError as error:
            pytest.skip(str(error))
        yield found


class Job:
    """What `launch` prints for an engine, on both hosts. agents: whether processes beside the ranks must be ended by force."""

    def __init__(self, engine: str, text: str, folder: Path, hosts: TwoHosts) -> None:
        self.agents = engine == "torchrun"
        self.started: list[Program] = []
        self._folder = folder
        self._hosts = hosts
        first, second = (shlex.join(hosts.command(name)) for name in NAMES)
        programs = {"srun": SRUN.format(first=first, second=second), "scontrol": "#!/bin/sh\necho host1\n"}
        programs |= {"train-cli": TRAIN_CLI, "torchrun": TRAIN_CLI.replace("train_cli", "torch.distributed.run")}
        self._path = {"PATH": put_on_path(folder, programs)}
        (folder / "job.sh").write_text(text, "utf-8")

    def start(self, *, again: bool = False) -> None:
        """Starts it on both hosts; again: as one that goes on."""
        if self.agents:
            more = ("--resume", "auto") if again else ()
            commands = [self._hosts.command(name, "bash", "job.sh", *more) for name in NAMES]
            given = {"HEAD": NAMES[0]}
        else:
            commands = [["bash", "job.sh"]]
            given = {"SLURM_JOB_NODELIST": "a", "SLURM_JOB_ID": "1", "SLURM_RESTART_COUNT": str(int(again))}
        self.started = [Program(one, self._folder, self._path | given, fresh=True) for one in commands]

    def told(self) -> str:
        return "\n".join(program.err for program in self.started)

    def close(self) -> None:
        for program in self.started:
            program.close()


@pytest.fixture(params=["torchrun", "slurm"])
def job(request: pytest.FixtureRequest, cli: Cli, plan: Path, hosts: TwoHosts) -> Iterator[Job]:
    text = cli("launch", plan, "--on", request.param, "--nodes", 2, changes=LIMITED).out
    job = Job(request.param, text, plan.parent, hosts)
    yield job
    job.close()


def test_a_host_that_is_cut_off_ends_the_run_and_is_back_for_the_next(job: Job, hosts: TwoHosts, cli: Cli, plan: Path) -> None:
    job.start()
    until(lambda: len(steps(plan)) >= 15, job.told)
    hosts.cut()
    # Of torchrun, whose agent on the host that was cut off waits much longer for its own store, the ranks are asked.
    until(lambda: all(f"failed on rank {rank}" in job.told() for rank in range(2)), job.told, LIMIT_S + TEAR_DOWN_S)
    assert job.told().count("error[collective-failed]") >= 2
    if not job.agents:
        assert job.started[0].finish(TEAR_DOWN_S).code != 0
    job.close()
    hosts.mend()

    assert 15 <= len(steps(plan)) < NUM_STEPS
    job.start(again=True)
    assert [program.finish(120).code for program in job.started] == [0] * len(job.started), job.told()
    assert "continuing after step" in job.told()
    assert_is_like_a_local_run(cli, plan, *LIMITED)


# -- SLURM -------------------------------------------------------------------------------------------------------------

ROOT = slurm_root()


@pytest.fixture
def slurm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmDaemons]:
    """SLURM, whose jobs find `train-cli`."""
    if ROOT is None:
        pytest.skip("SLEY_SLURM does not name a folder with SLURM: .ci/get_slurm makes one")
    monkeypatch.setenv("PATH", put_on_path(folder, {"train-cli": TRAIN_CLI}))
    with SlurmDaemons(ROOT, folder / "slurm") as daemons:
        yield daemons


def state(slurm: SlurmDaemons, job: str) -> str:
    words = slurm.call("scontrol", "show", "job", job).split()
    return next(word.removeprefix("JobState=") for word in words if word.startswith("JobState="))


def test_a_job_goes_on_when_it_is_put_back_into_the_queue(slurm: SlurmDaemons, cli: Cli, plan: Path) -> None:
    """What `launch` prints for one node, given to sbatch."""
    said = plan.parent / "said"

    def told() -> str:
        return slurm.call("scontrol", "show", "job") + (said.read_text("utf-8") if said.exists() else "")

    text = cli("launch", plan, "--on", "slurm", "--nodes", 1, changes=SAVES).out
    (plan.parent / "job.sbatch").write_text(text, "utf-8")
    job = slurm.call("sbatch", "--parsable", "--output=said", "job.sbatch", cwd=plan.parent).strip()
    until(lambda: len(steps(plan)) >= 15, told)
    slurm.call("scontrol", "requeue", job)
    until(lambda: state(slurm, job) == "PENDING", told)
    assert 15 <= len(steps(plan)) < NUM_STEPS
    slurm.call("scontrol", "update", f"jobid={job}", "starttime=now")  # it waits for two minutes else
    until(lambda: state(slurm, job) == "COMPLETED", told)
    assert "continuing after step" in told()
    assert_is_like_a_local_run(cli, plan, *SAVES)


def test_tasks_that_srun_alone_has_started_are_refused(slurm: SlurmDaemons, plan: Path) -> None:
    told = slurm.call("srun", "--ntasks=2", "train-cli", "run", "plan.toml", check=False, cwd=plan.parent)
    assert told.count("error[no-ranks]: srun has started 2 tasks") == 2
    assert not (plan.parent / "runs").exists()

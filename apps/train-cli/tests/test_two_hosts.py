"""Two hosts, one of which is cut off: both say so in time, by an error that has a name, and go on together when it is back."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from started_program import Program, Result
from two_hosts import NAMES, TwoHosts

from sley_core.attempt import WEIGHTS
from sley_core.weight_files.read import WeightFiles

Cli = Callable[..., Result]

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(400)]

LIMIT_S, TEAR_DOWN_S = 5, 20
"""For an exchange, and for what follows on a machine that is busy."""

CHANGES = (
    "run.steps=150",
    "checkpoint={every_steps=10, mode='sync'}",
    f"limits={{collective_timeout_s={LIMIT_S}, start_timeout_s=60}}",
)

PROGRAM = """#!/bin/sh
exec {python} -m {module} "$@"
"""

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
        for name, module in (("torchrun", "torch.distributed.run"), ("train-cli", "train_cli")):
            programs[name] = PROGRAM.format(python=sys.executable, module=module)
        (folder / "bin").mkdir()
        for name, program in programs.items():
            (folder / "bin" / name).write_text(program, "utf-8")
            (folder / "bin" / name).chmod(0o755)
        (folder / "job.sh").write_text(text, "utf-8")

    def start(self, *, again: bool = False) -> None:
        """Starts it on both hosts; again: as one that goes on."""
        path = {"PATH": f"{self._folder / 'bin'}:/usr/sbin:/usr/bin:/bin"}
        if self.agents:
            more = ("--resume", "auto") if again else ()
            commands = [self._hosts.command(name, "bash", "job.sh", *more) for name in NAMES]
            given = {"HEAD": NAMES[0]}
        else:
            commands = [["bash", "job.sh"]]
            given = {"SLURM_JOB_NODELIST": "a", "SLURM_JOB_ID": "1", "SLURM_RESTART_COUNT": str(int(again))}
        self.started = [Program(one, self._folder, path | given, fresh=True) for one in commands]

    @property
    def told(self) -> str:
        return "\n".join(program.err for program in self.started)

    def close(self) -> None:
        for program in self.started:
            program.close()


@pytest.fixture(params=["torchrun", "slurm"])
def job(request: pytest.FixtureRequest, cli: Cli, plan: Path, hosts: TwoHosts) -> Iterator[Job]:
    text = cli("launch", plan, "--on", request.param, "--nodes", 2, changes=CHANGES).out
    job = Job(request.param, text, plan.parent, hosts)
    yield job
    job.close()


def steps(plan: Path) -> list[int]:
    path = plan.parent / "runs/small/metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def until(is_so: Callable[[], bool], job: Job, limit_s: float) -> None:
    limit = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < limit, job.told
        time.sleep(0.05)


def test_a_host_that_is_cut_off_ends_the_run_and_is_back_for_the_next(job: Job, hosts: TwoHosts, cli: Cli, plan: Path) -> None:
    job.start()
    until(lambda: len(steps(plan)) >= 15, job, 120)
    hosts.cut()
    # Of torchrun, whose agent on the host that was cut off waits much longer for its own store, the ranks are asked.
    until(lambda: all(f"failed on rank {rank}" in job.told for rank in range(2)), job, LIMIT_S + TEAR_DOWN_S)
    assert job.told.count("error[collective-failed]") >= 2
    if not job.agents:
        assert job.started[0].finish(TEAR_DOWN_S).code != 0
    job.close()
    hosts.mend()

    done = len(steps(plan))
    assert 15 <= done < 150
    job.start(again=True)
    assert [program.finish(120).code for program in job.started] == [0] * len(job.started), job.told
    assert "going on after step" in job.told
    assert steps(plan) == list(range(1, 151))
    assert cli("run", plan, changes=[*CHANGES, "run.name=local"]).code == 0
    local, ours = (WeightFiles(plan.parent / "runs" / name / WEIGHTS) for name in ("local", "small"))
    assert all(local.tensor(name).equal(ours.tensor(name)) for name in local.names)

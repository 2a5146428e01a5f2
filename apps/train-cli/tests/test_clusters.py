"""A job on two hosts, one of which loses its network: both report a named error in time, and the job resumes."""

from __future__ import annotations

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
from sley_core.metrics.jsonl import rows
from sley_core.weight_files.read import WeightFiles

Cli = Callable[..., Result]

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(400)]

NUM_STEPS = 150
LIMIT_S, TEAR_DOWN_S = 5, 20
"""The time limits of an exchange, and of the end of all processes on a busy machine."""

CHANGES = (
    f"run.steps={NUM_STEPS}",
    "checkpoint={every_steps=10, mode='sync'}",
    f"limits={{collective_timeout_s={LIMIT_S}, start_timeout_s=60}}",
)
TRAIN_CLI = f'#!/bin/sh\nexec {sys.executable} -m train_cli "$@"\n'
SRUN = """#!/bin/bash
while [ "${{1#--}}" != "$1" ]; do shift; done
SLURM_PROCID=0 SLURM_LOCALID=0 {first} "$@" & first=$!
SLURM_PROCID=1 SLURM_LOCALID=0 {second} "$@" & second=$!
wait $first; code=$?
wait $second && exit $code
"""
"""A stub of srun: starts a task on each of the two hosts, with SLURM's variables."""


def finished_steps(plan: Path) -> list[int]:
    return [int(row["step"]) for row in rows(plan.parent / "runs/small")]


def wait_until(is_true: Callable[[], bool], message: Callable[[], str], limit_s: float = 120) -> None:
    deadline = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < deadline, message()
        time.sleep(0.1)


class Job:
    """A job that `launch` printed for an engine, on both hosts. has_agents: whether each host has a torchrun agent."""

    def __init__(self, engine: str, script: str, folder: Path, hosts: TwoHosts) -> None:
        self.has_agents = engine == "torchrun"
        self.programs: list[Program] = []
        self._folder = folder
        self._hosts = hosts
        first, second = (shlex.join(hosts.command(name)) for name in NAMES)
        programs = {"srun": SRUN.format(first=first, second=second), "scontrol": "#!/bin/sh\necho host1\n"}
        programs |= {"train-cli": TRAIN_CLI, "torchrun": TRAIN_CLI.replace("train_cli", "torch.distributed.run")}
        (folder / "bin").mkdir()
        for name, program in programs.items():
            (folder / "bin" / name).write_text(program, "utf-8")
            (folder / "bin" / name).chmod(0o755)
        (folder / "job.sh").write_text(script, "utf-8")

    def start(self, *, resumes: bool = False) -> None:
        environ = {"PATH": f"{self._folder / 'bin'}:/usr/sbin:/usr/bin:/bin"}
        if self.has_agents:
            options = ("--resume", "auto") if resumes else ()
            commands = [self._hosts.command(name, "bash", "job.sh", *options) for name in NAMES]
            environ |= {"HEAD": NAMES[0]}
        else:
            commands = [["bash", "job.sh"]]
            environ |= {"SLURM_JOB_NODELIST": "a", "SLURM_JOB_ID": "1", "SLURM_RESTART_COUNT": str(int(resumes))}
        self.programs = [Program(command, self._folder, environ, fresh=True) for command in commands]

    def errors(self) -> str:
        return "\n".join(program.err for program in self.programs)

    def close(self) -> None:
        for program in self.programs:
            program.close()


@pytest.fixture
def hosts(folder: Path) -> Iterator[TwoHosts]:
    with ExitStack() as stack:
        try:
            two_hosts = stack.enter_context(TwoHosts(folder))
        except OSError as error:
            pytest.skip(str(error))
        yield two_hosts


@pytest.mark.parametrize("engine", ["torchrun", "slurm"])
def test_a_job_resumes_after_a_host_lost_its_network(cli: Cli, plan: Path, hosts: TwoHosts, engine: str) -> None:
    script = cli("launch", plan, "--on", engine, "--nodes", 2, changes=CHANGES).out
    job = Job(engine, script, plan.parent, hosts)
    try:
        job.start()
        wait_until(lambda: len(finished_steps(plan)) >= 15, job.errors)
        hosts.cut()
        # torchrun's agent on the host without network waits longer for its own store, so only the ranks are checked.
        reports = [f"failed on rank {rank}" for rank in range(2)]
        wait_until(lambda: all(report in job.errors() for report in reports), job.errors, LIMIT_S + TEAR_DOWN_S)
        assert job.errors().count("error[collective-failed]") >= 2
        if not job.has_agents:
            assert job.programs[0].finish(TEAR_DOWN_S).code != 0
        job.close()
        hosts.mend()
        assert 15 <= len(finished_steps(plan)) < NUM_STEPS
        job.start(resumes=True)
        assert [program.finish(120).code for program in job.programs] == [0] * len(job.programs), job.errors()
        assert "continuing after step" in job.errors()
    finally:
        job.close()
    assert finished_steps(plan) == list(range(1, NUM_STEPS + 1))
    assert cli("run", plan, changes=[*CHANGES, "run.name=local"]).code == 0
    expected, actual = (WeightFiles(plan.parent / "runs" / name / WEIGHTS) for name in ("local", "small"))
    assert all(expected.tensor(name).equal(actual.tensor(name)) for name in expected.names)

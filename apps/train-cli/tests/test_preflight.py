"""Starts on two hosts that are set up wrong: none hangs, none ends with 0, all are told within seconds what to do, and where.

The hosts are two processes with the environment that an engine would give them.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from started_program import Program, Result

from train_cli import preflight

Cli = Callable[..., Result]
Start = Callable[..., Program]

LIMIT_S = 40.0
"""For two processes to start on a busy machine, and for the longest wait of a meeting."""


@dataclass(frozen=True)
class Wrong:
    """How two hosts are set up. both: variables of both; odd: of the second alone; changes, plan: its `--set` and plan.

    words: what is said. code: that of the host that is wrong, where its own fault has one of its own. alone: whether the wrong
    host cannot reach the other, which an engine ends then, as this test does; it would wait for [limits] start_timeout_s.
    """

    both: dict[str, str] = field(default_factory=dict)
    odd: dict[str, str] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    plan: str = "plan.toml"
    words: tuple[str, ...] = ()
    code: int = 1
    ranked: bool = True
    alone: bool = False


TABLE = {
    "two worlds of one, by srun": Wrong(
        both={"SLURM_STEP_NUM_TASKS": "2"}, words=("srun has started 2 tasks",), code=2, ranked=False
    ),
    "two worlds of one, by mpirun": Wrong(
        both={"OMPI_COMM_WORLD_SIZE": "2"}, words=("mpirun has started 2 processes",), code=2, ranked=False
    ),
    "two worlds of one, in pods": Wrong(
        both={"PET_NNODES": "2"}, words=("the TrainJob has started 2 pods", "torchrun -m"), code=2, ranked=False
    ),
    "a world of one in each of two tasks": Wrong(
        both={"SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "1", "RANK": "0"}, words=("tell it of 1 rank",), code=2
    ),
    "a rank of nobody knows how many": Wrong(
        both={"RANK": "1"}, words=("RANK is set, and WORLD_SIZE is not",), code=2, ranked=False
    ),
    "another plan": Wrong(
        changes=("optimizer.lr=0.5",), words=("rank 1 on", "another plan than rank 0", "`optimizer.lr` is 0.5, not 0.001")
    ),
    "no plan there": Wrong(plan="other.toml", words=("rank 1 on", "other.toml"), code=3),
    "no data there": Wrong(changes=('data.files=["gone.txt"]',), words=("rank 1 on", "cannot begin", "gone.txt"), code=3),
    "no plugin there": Wrong(changes=('gradient_handlers=[{use="absent.one"}]',), words=("rank 1 on", "absent"), code=4),
    "a name that nobody knows": Wrong(odd={"MASTER_ADDR": "no-such-host.invalid"}, words=("cannot be resolved",), alone=True),
    "itself as the first host": Wrong(
        odd={"MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "1"}, words=("MASTER_ADDR must be rank 0's host",), alone=True
    ),
    "more ranks than the plan has": Wrong(both={"WORLD_SIZE": "3"}, words=("3 != 1 x 2 x 1",), code=3),
    "the same rank twice": Wrong(both={"RANK": "0"}, words=("belongs to a run that has not ended",), code=3, alone=True),
    "no address": Wrong(both={"MASTER_ADDR": ""}, words=("MASTER_ADDR = ''",)),
    "a rank beyond the world": Wrong(odd={"RANK": "2"}, words=("says that it is rank 2 of 2",)),
}


@pytest.fixture
def port() -> str:
    with closing(socket.socket()) as free:
        free.bind(("", 0))
        return str(free.getsockname()[1])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", TABLE)
@pytest.mark.sample(3)
def test_a_start_that_is_wrong_is_refused(start: Start, plan: Path, port: str, name: str) -> None:
    wrong = TABLE[name]
    hosts = []
    begun = time.monotonic()
    for rank in range(2):
        found = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} | (
            {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0"} if wrong.ranked else {}
        )
        found |= wrong.both | (wrong.odd if rank else {})
        path, changes = (wrong.plan, wrong.changes) if rank else ("plan.toml", ())
        hosts.append(start("run", path, changes=changes, **found))
    if wrong.alone:
        while all(host.process.poll() is None for host in hosts):
            assert time.monotonic() - begun < LIMIT_S, "neither host has refused"
            time.sleep(0.05)
        for host in hosts:
            if host.process.poll() is None:
                os.kill(host.process.pid, signal.SIGTERM)
    ended = [host.finish(LIMIT_S) for host in hosts]
    told = "\n".join(one.err for one in ended)
    assert all(one.code != 0 for one in ended), told
    assert wrong.code in {one.code for one in ended}, told
    assert all(word in told for word in wrong.words), told
    assert "hint:" in told
    assert "Traceback" not in told
    assert time.monotonic() - begun < LIMIT_S
    assert not (plan.parent / "runs").exists() or not list((plan.parent / "runs").glob("*/metrics.jsonl"))


@pytest.mark.timeout(120)
def test_a_start_that_is_right_trains(start: Start, plan: Path, port: str) -> None:
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    hosts = [start("run", "plan.toml", RANK=str(rank), LOCAL_RANK="0", **given) for rank in range(2)]
    first, second = [host.finish() for host in hosts]
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "finished: 4 steps" in first.err


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (
            {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"},
            "on 1 of 4 cores; set OMP_NUM_THREADS=4",
        ),
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "x"}, ""),
        ({"OMP_NUM_THREADS": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}, ""),
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}, ""),
    ],
)
def test_a_launcher_that_takes_away_threads_is_told_of(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], words: str
) -> None:
    monkeypatch.setattr(preflight, "num_cores", lambda: 8)
    note = preflight.thread_note(environ, is_cpu=True)
    assert words in note
    assert bool(note) == bool(words)
    assert preflight.thread_note(environ, is_cpu=False) == ""

"""Starts on two hosts that are set up wrong: none hangs, none ends with 0, and all say within seconds what to do, and where.

The hosts are two processes with the environment that an engine would give them.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from started_program import Program

from sley_core.errors import UsageError
from train_cli import preflight

Start = Callable[..., Program]

LIMIT_S = 40.0
"""For two processes to start on a busy machine, and for the longest wait of a rendezvous."""

HOSTS = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture
def port() -> str:
    with closing(socket.socket()) as free:
        free.bind(("", 0))
        return str(free.getsockname()[1])


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"SLURM_STEP_NUM_TASKS": "2"}, "srun has started 2 tasks"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun has started 2 processes"),
        ({"PET_NNODES": "2"}, "the TrainJob has started 2 pods"),
        ({"SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "1", "RANK": "0"}, "tell it of 1 rank"),
        ({"RANK": "1"}, "RANK is set, and WORLD_SIZE is not"),
    ],
)
def test_processes_that_know_of_no_ranks_are_refused(environ: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        preflight.refuse_lone_worlds(environ)


def test_processes_that_know_their_ranks_are_not_refused() -> None:
    preflight.refuse_lone_worlds({})
    preflight.refuse_lone_worlds({"SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "2", "RANK": "0"})


WRONG: dict[str, tuple[str, tuple[str, ...], dict[str, str], tuple[str, ...], int]] = {
    "another plan": ("plan.toml", ("optimizer.lr=0.5",), {}, ("rank 1 on", "`optimizer.lr` is 0.5, not 0.001"), 1),
    "no plan there": ("other.toml", (), {}, ("rank 1 on", "other.toml"), 3),
    "no data there": ("plan.toml", ('data.files=["gone.txt"]',), {}, ("rank 1 on", "cannot begin", "gone.txt"), 3),
    "no plugin there": ("plan.toml", ('gradient_handlers=[{use="absent.one"}]',), {}, ("rank 1 on", "absent"), 4),
    "more ranks than the plan has": ("plan.toml", (), {"WORLD_SIZE": "3"}, ("3 != 1 x 2 x 1",), 3),
}
"""Of the second host: its plan, its `--set`, variables of both; the words that are said, and an exit code of one of them."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.sample(3)
def test_a_start_that_is_wrong_is_refused(start: Start, plan: Path, port: str, name: str) -> None:
    path, changes, both, words, code = WRONG[name]
    begun = time.monotonic()
    given = [{**HOSTS, "MASTER_PORT": port, "RANK": str(rank), **both} for rank in range(2)]
    hosts = [start("run", "plan.toml", **given[0]), start("run", path, changes=changes, **given[1])]
    ended = [host.finish(LIMIT_S) for host in hosts]
    told = "\n".join(one.err for one in ended)
    assert all(one.code != 0 for one in ended), told
    assert code in {one.code for one in ended}, told
    assert all(word in told for word in words), told
    assert "hint:" in told
    assert "Traceback" not in told
    assert time.monotonic() - begun < LIMIT_S
    assert not list(plan.parent.glob("runs/*/metrics.jsonl"))


@pytest.mark.timeout(120)
def test_a_rank_that_is_started_twice_is_refused_once(start: Start, plan: Path, port: str) -> None:
    """One of the two has the run's folder, and one the port: whoever lacks either says so; the other waits for rank 1."""
    begun = time.monotonic()
    ranks = [
        start("run", "plan.toml", **{**HOSTS, "MASTER_PORT": port, "RANK": "0", "LOCAL_WORLD_SIZE": "2"}) for _ in range(2)
    ]
    while all(rank.process.poll() is None for rank in ranks):
        assert time.monotonic() - begun < LIMIT_S, "neither has refused"
        time.sleep(0.05)
    refused = next(rank for rank in ranks if rank.process.poll() is not None)
    for rank in ranks:
        if rank.process.poll() is None:
            os.kill(rank.process.pid, signal.SIGTERM)
    ended = {rank: rank.finish(LIMIT_S) for rank in ranks}
    assert ended[refused].code in (1, 3)
    assert re.search(r"belongs to a run that has not ended|port \d+ cannot be had", ended[refused].err)
    assert "hint:" in ended[refused].err
    assert not any("Traceback" in rank.err for rank in ended.values())
    assert not list(plan.parent.glob("runs/*/metrics.jsonl"))


@pytest.mark.timeout(120)
def test_a_start_that_is_right_trains(start: Start, plan: Path, port: str) -> None:
    hosts = [start("run", "plan.toml", MASTER_PORT=port, RANK=str(rank), **HOSTS) for rank in range(2)]
    first, second = [host.finish() for host in hosts]
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "finished: 4 steps" in first.err


@pytest.mark.parametrize(
    ("threads", "ranks", "words"), [("1", "2", "on 1 of 4 cores; set OMP_NUM_THREADS=4"), ("1", "8", ""), ("2", "2", "")]
)
def test_a_launcher_that_takes_away_threads_is_noted(
    monkeypatch: pytest.MonkeyPatch, threads: str, ranks: str, words: str
) -> None:
    monkeypatch.setattr(preflight, "num_cores", lambda: 8)
    environ = {"OMP_NUM_THREADS": threads, "LOCAL_WORLD_SIZE": ranks, "TORCHELASTIC_RUN_ID": "x"}
    note = preflight.thread_note(environ, is_cpu=True)
    assert (words in note, bool(note)) == (True, bool(words))
    assert preflight.thread_note(environ, is_cpu=False) == ""
    del environ["TORCHELASTIC_RUN_ID"]
    assert preflight.thread_note(environ, is_cpu=True) == ""

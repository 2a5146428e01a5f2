"""Ranks meet before they wait for one another: all start, or each says which rank differs, where, and what to do.

Ranks are threads here; at the end they are two processes with the environment that an engine would give them.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from started_program import Program
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it

from sley_core.comm import startup
from sley_core.errors import RunError, UsageError
from train_cli import preflight
from train_cli import rendezvous as module
from train_cli.rendezvous import Rendezvous

pytestmark = pytest.mark.timeout(120)

FACTS = {"the plan": "abc", "torch": "2.13.0", "plugin dp": "sley-dp 0.1.0"}
PARTS = {"the plan": {"run.steps": "5", "optimizer.lr": "0.1"}}

SECOND = {"MASTER_ADDR": "localhost"}
"""For a second process of one rank: a process counts its meetings by rank and by the name of the place."""

held: list[Rendezvous] = []
"""Rank 0's store is there as long as its run, which other ranks read to the end."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 1.0)
    monkeypatch.setattr(module, "STRAGGLERS_S", 0.1)


@pytest.fixture
def port() -> int:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        found: int = free.getsockname()[1]
    startup.reset()  # the system may give a port twice
    return found


def environ(port: int, rank: int, size: int, **more: str) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **more}


def errors_of(calls: Mapping[str, Callable[[], Any]]) -> dict[str, str]:
    """What each of the calls raised, "" for nothing, all of them at once in threads of their own."""
    found: dict[str, str] = {}

    def call(name: str) -> None:
        try:
            calls[name]()
            found[name] = ""
        except RunError as error:
            found[name] = str(error)

    threads = [threading.Thread(target=call, args=(name,)) for name in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    held.clear()
    assert found.keys() == calls.keys(), "a rank hangs"
    return found


def arrive(port: int, rank: int, size: int, timeout_s: float = 5, **more: str) -> Rendezvous:
    at = Rendezvous.join(environ(port, rank, size, **more), timeout_s=timeout_s)
    at.host = f"host{rank}"
    held.append(at)
    return at


def comes(
    port: int, rank: int, size: int, facts: dict[str, str] = FACTS, timeout_s: float = 5, **more: str
) -> Callable[[], None]:
    """A rank that comes to the rendezvous with `facts`, from a host of its own."""

    def come() -> None:
        at = arrive(port, rank, size, timeout_s, **more)
        at.agree(facts, {"the plan": PARTS["the plan"] | {"optimizer.lr": "0.5"}} if facts["the plan"] != "abc" else PARTS)

    return come


def builds(
    port: int, rank: int, size: int, seconds: float = 0.0, *, fails: bool = False, limit_s: float = 600, rounds: int = 1
) -> Callable[[], None]:
    """A rank that comes, and then builds for some `seconds`."""

    def build() -> None:
        at = arrive(port, rank, size)
        at.agree(FACTS, PARTS)
        for number in range(rounds):
            with at.all_or_none(limit_s):
                time.sleep(seconds)
                if fails and number == rounds - 1:
                    raise RunError("no-tokenizer", "there is no `tokenizer.json`", hint="copy it there")

    return build


def test_ranks_that_agree_start_however_often_they_meet(port: int) -> None:
    def thrice(rank: int) -> Callable[[], None]:
        def work() -> None:
            for number in range(3):
                time.sleep(0.1 * (3 - rank))
                at = arrive(port, rank, 3)
                at.agree(FACTS | {"the plan": str(number)}, PARTS)
                with at.all_or_none(20):
                    time.sleep(0.1 * rank)

        return work

    assert set(errors_of({str(rank): thrice(rank) for rank in range(3)}).values()) == {""}


def test_ranks_that_meet_again_compare_again(port: int) -> None:
    def twice(rank: int) -> Callable[[], None]:
        def work() -> None:
            comes(port, rank, 2)()
            comes(port, rank, 2, FACTS | {"torch": f"2.{rank}.0"})()

        return work

    found = errors_of({str(rank): twice(rank) for rank in range(2)})
    assert all("rank 1 on host1 has torch 2.1.0, but rank 0 on host0 has 2.0.0" in error for error in found.values()), found


def test_a_store_of_an_earlier_start_is_refused(port: int) -> None:
    """torchrun's agents on several hosts keep theirs when they start ranks again."""
    agents = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "2"}
    assert set(errors_of({str(rank): comes(port, rank, 2, **torchrun) for rank in range(2)}).values()) == {""}
    for rank in (1, 0):
        startup.reset()  # as new processes
        assert "`--max-restarts=0`" in errors_of({"again": comes(port, rank, 2, **torchrun)})["again"]
    del agents


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"the plan": "xyz"}, "rank 2 on host2 has another plan than rank 0 on host0: `optimizer.lr` is 0.5, not 0.1"),
        ({"torch": "2.12.0"}, "rank 2 on host2 has torch 2.12.0, but rank 0 on host0 has 2.13.0"),
        ({"plugin odd": "odd 1"}, "has plugin odd odd 1, but rank 0 on host0 has none"),
    ],
)
def test_a_host_that_differs_is_named_to_all(port: int, own: dict[str, str], words: str) -> None:
    found = errors_of({str(rank): comes(port, rank, 3, FACTS | own if rank == 2 else FACTS) for rank in range(3)})
    assert all(words in error for error in found.values()), found


@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_that_cannot_begin_is_named_to_all(port: int, odd: int) -> None:
    others = {str(rank): comes(port, rank, 3) for rank in range(3) if rank != odd}
    found = errors_of({"odd": lambda: arrive(port, odd, 3).give_up("no file `plan.toml`", "copy it there"), **others})
    assert found.pop("odd") == "", "it has an error of its own"
    assert all(f"rank {odd} on host{odd} cannot start: no file `plan.toml`" in error for error in found.values()), found
    assert all("copy it there" in error for error in found.values())


def test_ranks_that_do_not_come_are_named(port: int) -> None:
    found = errors_of({str(rank): comes(port, rank, 5, timeout_s=1) for rank in (0, 1, 3)})
    words = "of 5 ranks, these did not connect within 1 s: 2, 4 (hosts that did: host0, host1, host3)"
    assert all(words in error for error in found.values()), found


def test_two_processes_of_one_rank(port: int) -> None:
    found = errors_of({"0": comes(port, 0, 3), "1": comes(port, 1, 3), "again": comes(port, 1, 3, **SECOND)})
    assert all("two processes, on host1 and host1, have RANK 1" in error for error in found.values()), found


@pytest.mark.parametrize("gives_up", [False, True])
def test_another_run_at_the_port_is_left_alone(port: int, gives_up: bool) -> None:
    """The stranger is refused, and does no harm to those who have met there rightly."""

    def stranger() -> None:
        if gives_up:
            arrive(port, 1, 2, SLURM_JOB_ID="8", **SECOND).give_up("no file", None)
        else:
            comes(port, 1, 2, SLURM_JOB_ID="8", **SECOND)()

    ours = {str(rank): comes(port, rank, 2, SLURM_JOB_ID="7") for rank in range(2)}
    found = errors_of({**ours, "stranger": stranger})
    assert gives_up or "another run uses this port (job 7 of 2 ranks, on host0)" in found["stranger"]
    assert {found["0"], found["1"]} == {""}


@contextmanager
def stranger_at(port: int) -> Iterator[None]:
    """A program that listens there and says nothing."""
    with closing(socket.socket()) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        yield


def test_a_taken_port(port: int) -> None:
    with stranger_at(port):
        found = errors_of({"0": comes(port, 0, 2), "1": comes(port, 1, 2)})
    assert f"port {port} is in use" in found["0"]
    assert f"the program at 127.0.0.1:{port} is not a rendezvous store" in found["1"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"MASTER_ADDR": "no-such-host.invalid"}, "the name `no-such-host.invalid` cannot be resolved"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR = ''"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT = 'http'"),
        ({"LOCAL_WORLD_SIZE": "1"}, "set MASTER_ADDR to rank 0's host on all hosts, not to localhost"),
    ],
)
def test_an_address_that_leads_nowhere(port: int, more: dict[str, str], words: str) -> None:
    """The last is a second host whose MASTER_ADDR is itself: nobody will come, whatever the time limit."""
    begun = time.monotonic()
    with pytest.raises(RunError, match="preflight") as caught:
        Rendezvous.join(environ(port, 1, 2, **more), timeout_s=600)
    assert words in str(caught.value)
    assert time.monotonic() - begun < 20


def test_a_listener_that_closes_connections_is_waited_for(port: int) -> None:
    """What listens for a host that is late, such as a proxy, lets nobody through; then rank 0 comes."""
    with closing(socket.socket()) as proxy:
        proxy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        proxy.bind(("127.0.0.1", port))
        proxy.listen()

        def first() -> None:
            for _ in range(3):
                proxy.accept()[0].close()
            proxy.close()
            comes(port, 0, 2, timeout_s=20)()

        assert set(errors_of({"0": first, "1": comes(port, 1, 2, timeout_s=20)}).values()) == {""}


def test_a_store_that_ends_with_its_process(port: int) -> None:
    first, second = (Rendezvous.join(environ(port, rank, 2), timeout_s=5) for rank in range(2))
    del first
    with pytest.raises(RunError, match=r"preflight.*rank 1 has lost the connection"):
        second.agree(FACTS, PARTS)
    second.give_up("there is no `plan.toml`", None)  # nobody hears it, and that is no error of its own


@pytest.mark.parametrize(("odd", "slow", "rounds"), [(0, 1, 1), (2, 0, 2)])
def test_a_rank_that_fails_while_others_build_ends_all(port: int, odd: int, slow: int, rounds: int) -> None:
    """Rank 0 keeps the store until others, which build longer, know why it failed."""
    calls = {str(rank): builds(port, rank, 3, 1.0 * (rank == slow), fails=rank == odd, rounds=rounds) for rank in range(3)}
    found = errors_of(calls)
    assert found.pop(str(odd)).startswith("error[no-tokenizer]"), "its own error, as it was"
    words = f"rank {odd} on host{odd} cannot start: there is no `tokenizer.json`"
    assert all(words in error and "copy it there" in error for error in found.values()), found


def test_a_rank_that_is_killed_while_others_build_is_named_with_its_limit(port: int) -> None:
    child = os.fork()
    if child == 0:
        arrive(port, 2, 3).agree(FACTS, PARTS)
        os._exit(1)
    found = errors_of({str(rank): builds(port, rank, 3, limit_s=1.0) for rank in range(2)})
    os.waitpid(child, 0)
    words = "of 3 ranks, these did not open their data and build their model within 1 s: 2 (hosts that did: host0, host1)"
    assert all(words in error and "collective_timeout_s" in error for error in found.values()), found


# -- before ranks meet -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"SLURM_STEP_NUM_TASKS": "2"}, "srun has started 2 tasks"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun has started 2 processes"),
        ({"PET_NNODES": "2"}, "the TrainJob has started 2 pods"),
        ({"SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "1", "RANK": "0"}, "but WORLD_SIZE is 1"),
        ({"RANK": "1"}, "RANK is set, but WORLD_SIZE is not"),
    ],
)
def test_processes_that_know_of_no_ranks_are_refused(environ: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        preflight.refuse_single_process_worlds(environ)
    for complete in ({}, {"SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "2", "RANK": "0"}):
        preflight.refuse_single_process_worlds(complete)


@pytest.mark.parametrize(
    ("threads", "ranks", "words"), [("1", "2", "uses only 1 of 4 cores; set OMP_NUM_THREADS=4"), ("1", "8", ""), ("2", "2", "")]
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


# -- commands on two hosts ---------------------------------------------------------------------------------------------

Start = Callable[..., Program]

LIMIT_S = 40.0
"""For two processes to start on a busy machine, and for the longest wait of a rendezvous."""

HOSTS = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}

WRONG: dict[str, tuple[str, tuple[str, ...], dict[str, str], tuple[str, ...], int]] = {
    "another plan": ("plan.toml", ("optimizer.lr=0.5",), {}, ("rank 1 on", "`optimizer.lr` is 0.5, not 0.001"), 1),
    "no plan there": ("other.toml", (), {}, ("rank 1 on", "other.toml"), 3),
    "no data there": ("plan.toml", ('data.files=["gone.txt"]',), {}, ("rank 1 on", "cannot start", "gone.txt"), 3),
    "no plugin there": ("plan.toml", ('gradient_handlers=[{use="absent.one"}]',), {}, ("rank 1 on", "absent"), 4),
}
"""Of the second host: its plan, its `--set`, variables of both; the words that are said, and an exit code of one of them."""


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", WRONG)
def test_a_start_that_is_wrong_is_refused(start: Start, plan: Path, port: int, name: str) -> None:
    path, changes, both, words, code = WRONG[name]
    begun = time.monotonic()
    given = [{**HOSTS, "MASTER_PORT": str(port), "RANK": str(rank), **both} for rank in range(2)]
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


def test_a_rank_that_is_started_twice_is_refused_once(start: Start, plan: Path, port: int) -> None:
    """One of the two has the run's folder, and one the port: whoever lacks either says so; the other waits for rank 1."""
    begun = time.monotonic()
    ranks = [
        start("run", "plan.toml", **{**HOSTS, "MASTER_PORT": str(port), "RANK": "0", "LOCAL_WORLD_SIZE": "2"}) for _ in range(2)
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
    assert re.search(r"is used by an active run|port \d+ is in use", ended[refused].err)
    assert "hint:" in ended[refused].err
    assert not any("Traceback" in rank.err for rank in ended.values())
    assert not list(plan.parent.glob("runs/*/metrics.jsonl"))


def test_a_start_that_is_right_trains(start: Start, plan: Path, port: int) -> None:
    hosts = [start("run", "plan.toml", MASTER_PORT=str(port), RANK=str(rank), **HOSTS) for rank in range(2)]
    first, second = [host.finish() for host in hosts]
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "finished: 4 steps" in first.err

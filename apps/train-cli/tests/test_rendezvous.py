"""The rendezvous starts all ranks, or all errors name the rank that differs, its host and a hint. Ranks are threads, and at the
end two processes with the environment of a launcher.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from started_program import Result, Start
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it

from sley_core.comm.world import reset_stores
from sley_core.errors import Diagnostic, RunError, UsageError
from train_cli import rendezvous as module
from train_cli.commands.run import check_launcher_variables
from train_cli.rendezvous import Rendezvous

pytestmark = pytest.mark.timeout(120)

INFO = {"the plan": "abc", "torch": "2.13.0", "plugin dp": "sley-dp 0.1.0"}
DETAILS = {"the plan": {"run.steps": "5", "optimizer.lr": "0.1"}}

NO_PLAN = Diagnostic("plan-unreadable", "no file `plan.toml`", hint="copy it there")
SECOND = {"MASTER_ADDR": "localhost"}
"""The variables of a second process of a rank: a process counts its rendezvous by rank and address."""

open_rendezvous: list[Rendezvous] = []
"""Keeps the store of rank 0 until the other ranks have read it."""


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESPONSE_TIMEOUT_S", 1.0)
    monkeypatch.setattr(module, "ARRIVAL_GRACE_S", 0.1)


def environ(port: int, rank: int, size: int, **changes: str) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **changes}


def errors_of(calls: Mapping[str, Callable[[], Any]]) -> dict[str, str]:
    """Makes all calls at the same time in threads. Returns the error of each, or ""."""
    errors: dict[str, str] = {}

    def call(name: str) -> None:
        try:
            calls[name]()
            errors[name] = ""
        except RunError as error:
            errors[name] = str(error)

    threads = [threading.Thread(target=call, args=(name,)) for name in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    open_rendezvous.clear()
    assert errors.keys() == calls.keys(), "a rank hangs"
    return errors


def arrive(port: int, rank: int, size: int, timeout_s: float = 5, **changes: str) -> Rendezvous:
    rendezvous = Rendezvous.join(environ(port, rank, size, **changes), timeout_s=timeout_s)
    rendezvous.host = f"host{rank}"
    open_rendezvous.append(rendezvous)
    return rendezvous


def agrees(
    port: int, rank: int, size: int, info: dict[str, str] = INFO, timeout_s: float = 5, **changes: str
) -> Callable[[], None]:
    """Returns a call in which a rank compares its `info` with the others."""
    details = {"the plan": DETAILS["the plan"] | ({} if info["the plan"] == "abc" else {"optimizer.lr": "0.5"})}
    return lambda: arrive(port, rank, size, timeout_s, **changes).agree(info, details)


def builds(
    port: int, rank: int, size: int, seconds: float = 0.0, *, fails: bool = False, limit_s: float = 600, rounds: int = 1
) -> Callable[[], None]:
    """Returns a call in which a rank agrees, and then builds for `seconds`."""

    def call() -> None:
        rendezvous = arrive(port, rank, size)
        rendezvous.agree(INFO, DETAILS)
        for number in range(rounds):
            with rendezvous.all_or_none(limit_s):
                time.sleep(seconds)
                if fails and number == rounds - 1:
                    raise RunError("no-tokenizer", "there is no `tokenizer.json`", hint="copy it there")

    return call


def test_ranks_that_agree_start_several_times(port: int) -> None:
    def agree_three_times(rank: int) -> None:
        for number in range(3):
            time.sleep(0.02 * (3 - rank))
            rendezvous = arrive(port, rank, 3)
            rendezvous.agree(INFO | {"the plan": str(number)}, DETAILS)
            with rendezvous.all_or_none(20):
                time.sleep(0.02 * rank)

    assert set(errors_of({str(rank): partial(agree_three_times, rank) for rank in range(3)}).values()) == {""}


def test_a_store_of_an_earlier_start_is_refused(port: int) -> None:
    """torchrun's agents on several hosts keep their store when they restart ranks."""
    agents = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_WORLD_SIZE": "2"}
    assert set(errors_of({str(rank): agrees(port, rank, 2, **torchrun) for rank in range(2)}).values()) == {""}
    for rank in (1, 0):
        reset_stores()  # as new processes
        assert "`--max-restarts=0`" in errors_of({"again": agrees(port, rank, 2, **torchrun)})["again"]
    del agents


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"the plan": "xyz"}, "rank 2 on host2 has a different plan from rank 0 on host0: `optimizer.lr` is 0.5, not 0.1"),
        ({"torch": "2.12.0"}, "rank 2 on host2 has torch 2.12.0, but rank 0 on host0 has 2.13.0"),
    ],
)
def test_all_errors_name_a_host_that_differs(port: int, changes: dict[str, str], message: str) -> None:
    errors = errors_of({str(rank): agrees(port, rank, 3, INFO | changes if rank == 2 else INFO) for rank in range(3)})
    assert all(message in error for error in errors.values()), errors


@pytest.mark.parametrize("failing", [0, 1])
def test_all_errors_name_a_rank_that_cannot_start(port: int, failing: int) -> None:
    calls = {str(rank): agrees(port, rank, 3) for rank in range(3) if rank != failing}
    errors = errors_of({"failing": lambda: arrive(port, failing, 3).report_failure(NO_PLAN), **calls})
    assert errors.pop("failing") == "", "it has an error of its own"
    message = f"rank {failing} on host{failing} cannot start: no file `plan.toml`"
    assert all(message in error and "copy it there" in error for error in errors.values()), errors


def test_missing_ranks_are_named(port: int) -> None:
    errors = errors_of({str(rank): agrees(port, rank, 5, timeout_s=1) for rank in (0, 1, 3)})
    message = "of 5 ranks, these did not connect within 1 s: 2, 4 (hosts of the other ranks: host0, host1, host3)"
    assert all(message in error for error in errors.values()), errors


def test_two_processes_with_one_rank_are_refused(port: int) -> None:
    errors = errors_of({"0": agrees(port, 0, 3), "1": agrees(port, 1, 3), "second": agrees(port, 1, 3, **SECOND)})
    assert all("two processes, on host1 and host1, have RANK 1" in error for error in errors.values()), errors


def test_another_run_at_the_port_is_refused(port: int) -> None:
    """The ranks of the first run start."""
    calls = {str(rank): agrees(port, rank, 2, SLURM_JOB_ID="7") for rank in range(2)}
    errors = errors_of({**calls, "stranger": agrees(port, 1, 2, SLURM_JOB_ID="8", **SECOND)})
    assert "another run uses this port (job 7 of 2 ranks, on host0)" in errors.pop("stranger")
    assert set(errors.values()) == {""}


def test_a_port_in_use_is_refused(port: int) -> None:
    with closing(socket.socket()) as silent_server:
        silent_server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        silent_server.bind(("127.0.0.1", port))
        silent_server.listen()
        errors = errors_of({"0": agrees(port, 0, 2), "1": agrees(port, 1, 2)})
    assert f"port {port} is in use" in errors["0"]
    assert f"the program at 127.0.0.1:{port} is not a rendezvous store" in errors["1"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"MASTER_ADDR": "no-such-host.invalid"}, "the name `no-such-host.invalid` cannot be resolved"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR = ''"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT = 'http'"),
        ({"LOCAL_WORLD_SIZE": "1"}, "set MASTER_ADDR to rank 0's host on all hosts, not to localhost"),
    ],
)
def test_a_wrong_address_is_refused(port: int, changes: dict[str, str], message: str) -> None:
    """In the last case a second host's MASTER_ADDR is localhost."""
    start_s = time.monotonic()
    with pytest.raises(RunError, match="preflight") as caught:
        Rendezvous.join(environ(port, 1, 2, **changes), timeout_s=600)
    assert message in str(caught.value)
    assert time.monotonic() - start_s < 20


def test_a_lost_store_is_an_error(port: int) -> None:
    first, second = (Rendezvous.join(environ(port, rank, 2), timeout_s=5) for rank in range(2))
    del first
    with pytest.raises(RunError, match=r"preflight.*rank 1 has lost the connection"):
        second.agree(INFO, DETAILS)
    second.report_failure(NO_PLAN)  # no rank reads it, which is no error


def test_a_rank_that_fails_to_build_ends_all(port: int) -> None:
    """Rank 0 builds longer, and keeps the store until the others know the reason."""
    calls = {str(rank): builds(port, rank, 3, 0.5 * (rank == 0), fails=rank == 2, rounds=2) for rank in range(3)}
    errors = errors_of(calls)
    assert errors.pop("2").startswith("error[no-tokenizer]"), "its own error"
    message = "rank 2 on host2 cannot start: there is no `tokenizer.json`"
    assert all(message in error and "copy it there" in error for error in errors.values()), errors


def test_a_rank_that_is_killed_while_it_builds_is_named(port: int) -> None:
    child = os.fork()
    if child == 0:
        arrive(port, 2, 3).agree(INFO, DETAILS)
        os._exit(1)
    errors = errors_of({str(rank): builds(port, rank, 3, limit_s=1.0) for rank in range(2)})
    os.waitpid(child, 0)
    message = (
        "of 3 ranks, these did not open their data and build their model within 1 s: 2 (hosts of the other ranks: host0, host1)"
    )
    assert all(message in error and "collective_timeout_s" in error for error in errors.values()), errors


# -- environment -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"SLURM_STEP_NUM_TASKS": "2"}, "srun has started 2 tasks"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun has started 2 processes"),
        ({"PET_NNODES": "2"}, "the TrainJob has started 2 pods"),
        ({"SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "1", "RANK": "0"}, "but WORLD_SIZE is 1"),
        ({"RANK": "1"}, "RANK is set, but WORLD_SIZE is not"),
    ],
)
def test_launchers_without_ranks_are_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_launcher_variables(environ)
    for complete in ({}, {"SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "2", "RANK": "0"}):
        check_launcher_variables(complete)


# -- two processes -----------------------------------------------------------------------------------------------------


HOSTS = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


def run_hosts(start: Start, port: int, *changes: str) -> list[Result]:
    """Runs one rank on each of two hosts. changes: the values of the second host's `--set` options."""
    first, second = ({**HOSTS, "MASTER_PORT": str(port), "RANK": str(rank)} for rank in range(2))
    programs = [start("run", "plan.toml", **first), start("run", "plan.toml", changes=changes, **second)]
    return [program.finish() for program in programs]


def test_hosts_that_differ_are_refused(start: Start, plan: Path, port: int) -> None:
    results = run_hosts(start, port, "optimizer.lr=0.5")
    output = "\n".join(result.err for result in results)
    assert [result.code for result in results] == [1, 1], output
    assert all(message in output for message in ("rank 1 on", "`optimizer.lr` is 0.5, not 0.001", "hint:")), output
    assert "Traceback" not in output
    assert not list(plan.parent.glob("runs/*/metrics.jsonl"))


def test_equal_hosts_train(start: Start, plan: Path, port: int) -> None:
    first, second = run_hosts(start, port)
    first.expect(0, "finished: 4 steps")
    second.expect(0)

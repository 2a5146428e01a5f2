"""What is left of a run that failed, and what `doctor` says of it: nothing runs on, nothing is left in shared memory."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from acting_model import doing

from sley_core.metrics.jsonl import rows
from sley_doctor.reports.fault_report import FaultReport, LaunchReport, write, write_launch
from train_cli.run_folder import FAULTS, WORK

pytestmark = pytest.mark.timeout(240)

Start = Callable[..., Any]
Cli = Callable[..., Any]
Own = Callable[[str], Path]

LIMIT_S = 8.0
GRACE_S = 10.0
"""After the limit of waits: until then a rank that does not answer is named and ended."""

LIMIT = ("--set", f"limits.collective_timeout_s={LIMIT_S}")

AT_THE_THIRD_STEP = """
    from pathlib import Path
    if self.calls == 5 and rank == 1 and again == "0":
        time.sleep(1)  # until the test has seen both ranks
        Path("when").write_text(str(time.time()))
        {action}
    if self.calls == 1 and rank == 0 and again == "1":
        Path("again").write_text(str(time.time()))
"""


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def of_processes(names: set[str], pids: list[int]) -> set[str]:
    return {name for name in names if set(map(int, re.findall(r"\d+", name))) & set(pids)}


def doing_once(action: str) -> str:
    return doing(AT_THE_THIRD_STEP.format(action=action))


KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
STOPPED = "os.kill(os.getpid(), signal.SIGSTOP)"
RAISED = "raise ValueError('no good')"
BUSY = "time.sleep(3600)"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("action", "kind", "told"),
    [
        (KILLED, "killed", "rank 1 was killed by SIGKILL"),
        (STOPPED, "stopped", "rank 1 did not answer: it is stopped, as by SIGSTOP"),
        (RAISED, "error", "rank 1 failed: ValueError: no good in layer `only` (Tiny)"),
        (BUSY, "busy", "rank 1 did not come to the others: it was at "),
    ],
    ids=["killed", "stopped", "raised", "busy"],
)
def test_doctor_names_the_rank_and_nothing_is_left(
    start: Start, own_model: Own, cli: Cli, folder: Path, action: str, kind: str, told: str
) -> None:
    program = start("run", own_model(doing_once(action)), *LIMIT)
    program.wait_for("rank 0 holds ")
    pids = [rank.pid for rank in program.ranks()]
    result = program.finish(90)  # which fails if a process is left
    ended = time.time()
    assert result.code == 1
    assert ended - float((folder / "when").read_text("utf-8")) < LIMIT_S + GRACE_S + 5, "of which 5 for a busy machine"
    assert len(pids) == 2
    assert of_processes(shared_memory(), pids) == set()
    said = cli("doctor", "runs/small")
    assert said.code == 0
    assert f"cause     {told}" in said.out
    assert "rank      1\nstep      3\n" in said.out
    assert "remedy    " in said.out
    (verdict,) = json.loads(cli("doctor", "runs/small", "--format", "json").out)["attempts"]
    assert (verdict["kind"], verdict["ranks"], verdict["attempt"]) == (kind, [1], 0)
    # Those that speak for themselves name the action; of the others their peers say in what they waited.
    assert verdict["layer"] == "only" if kind in ("error", "busy") else verdict["exchanges"]


@pytest.mark.campaign
def test_torchrun_starts_the_ranks_again_at_once_and_both_attempts_are_told_apart(
    start: Start, own_model: Own, cli: Cli, folder: Path
) -> None:
    """The ranks of the second attempt do not read the addresses of the first in the agent's store."""
    options = ("--max-restarts", "1", "--monitor-interval", "0.1")
    result = start("run", own_model(doing_once(RAISED)), *LIMIT, torchrun=options).finish(100)
    assert result.code == 0, result.err
    seconds = float((folder / "again").read_text("utf-8")) - float((folder / "when").read_text("utf-8"))
    print(f"first step of the second attempt after {seconds:.1f} s")
    assert seconds < 40, "a wait for addresses that nobody has takes the limit of start-up, 120 s"
    rows = (folder / "runs" / "small" / "metrics.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3, 4]
    (verdict,) = json.loads(cli("doctor", "runs/small", "--format", "json").out)["attempts"]
    assert (verdict["attempt"], verdict["kind"], verdict["ranks"]) == (0, "error", [1])


def test_a_run_that_is_asked_to_end_says_where_it_was_if_it_cannot(
    start: Start, own_model: Own, cli: Cli, folder: Path
) -> None:
    unwilling = ("--set", "limits.collective_timeout_s=600", "--set", "run.final_weights=none")  # saving has 25 s
    program = start("run", own_model(doing_once(BUSY)), *unwilling)
    program.wait_for("step 2/")
    while not (folder / "when").exists():
        time.sleep(0.05)
    os.kill(program.process.pid, signal.SIGTERM)
    assert program.finish(60).code == 143
    said = cli("doctor", "runs/small").out
    assert "cause     rank 1 did not come to the others: it was at " in said
    assert "rank 0 waited for it in the " in said


def long_ago(made: Path) -> None:
    then = time.time() - 960
    os.utime(made / "metrics.jsonl", (then, then))


def work_long_ago(made: Path) -> None:
    """Sets the times of windows back."""
    for path in (made / WORK).iterdir():
        lines = [json.loads(one) for one in path.read_text("utf-8").splitlines()]
        path.write_text("".join(json.dumps({**one, "time": one["time"] - 960}) + "\n" for one in lines), "utf-8")


@pytest.mark.campaign
def test_where_ranks_were_is_told_of_a_run_that_was_killed_as_a_whole(
    start: Start, own_model: Own, cli: Cli, folder: Path
) -> None:
    """A launcher that is killed takes its ranks with it, and nobody can report anything."""
    program = start("run", own_model(doing("time.sleep(0.02)")), "--set", "run.steps=10000", "--set", "run.log_every=5")
    program.wait_for("step 25/")
    while not any((folder / "runs" / "small" / "work").glob("rank-1.jsonl")):
        time.sleep(0.05)
    under_way = json.loads(cli("doctor", "runs/small", "--format", "json").out)["state"]
    assert (under_way["state"], under_way["step"] >= 25) == ("running", True)
    os.kill(program.process.pid, signal.SIGKILL)
    program.finish(60)
    last = list(rows(folder / "runs" / "small"))[-1]["step"]
    said = cli("doctor", "runs/small").out
    assert f"or on the host of rank 0); all ranks finished step {last}, " in said
    long_ago(folder / "runs" / "small")
    work_long_ago(folder / "runs" / "small")
    said = cli("doctor", "runs/small").out
    assert f"it was killed; all ranks finished step {last}, 16 min ago, and none finished step {last + 1}" in said
    for rank in (0, 1):
        assert re.search(rf"rank {rank} \(stage 0\): (works .* ms of a step|recorded up to step \d+)", said), said


def test_reports_are_of_the_last_run_and_do_not_keep_the_next_from_its_folder(
    start: Start, own_model: Own, cli: Cli, folder: Path
) -> None:
    made = folder / "runs" / "small"
    path = own_model(doing_once("pass"))
    write(made, FaultReport(0, 2, "error", 1.0, "collective-failed", "it failed"))
    (made / "plan.toml").write_text('source_folder = "."', "utf-8")
    assert start("run", path).finish(60).code == 0
    assert not (made / FAULTS).exists()
    assert cli("run", path).code == 3, "now it has results"


def test_attempts_damage_and_folders_that_are_none(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = folder / "runs" / "small"
    assert cli("doctor", made).code == 2
    write_launch(made, LaunchReport(2, {1: -9}, {}, 1))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    write(made, FaultReport(0, 2, "error", 1.0, "own-code", "ValueError: no"))
    (made / FAULTS / "1" / "rank-1.json").write_text("{", "utf-8")
    said = cli("doctor", made)
    assert said.code == 0
    first, second, slow = said.out.split("\n\n")
    assert slow == "slow      cannot be told: no rank has recorded a step\n"
    assert first.startswith("attempt 0\ncause     rank 1 was killed by SIGKILL\n")
    assert second.startswith("attempt 1\ncause     rank 0 failed: ValueError: no\n")
    assert "could not be read: rank-1.json" in second

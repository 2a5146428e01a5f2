"""What a run does, and says, when its surroundings fail it: full disks, closed pipes, ranks that hang or abort, children."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from acting_model import FIRST_LINE, doing

from sley_testing.processes import assert_none_left, processes_with
from train_cli import rank
from train_cli.local_launch import _SignalForwarder
from train_cli.stopping import exit_codes

pytestmark = pytest.mark.timeout(180)

Cli = Callable[..., Any]
Start = Callable[..., Any]
Own = Callable[[str], Path]


def errors(err: str) -> list[str]:
    return [line for line in err.splitlines() if "error[" in line]


def summary(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "runs" / "small" / "summary.json").read_text("utf-8"))
    return content


# -- who is to find_cause ---------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("action", "killed", "name"), [("os.abort()", 1, "SIGABRT"), ("os.kill(os.getpid(), 9)", 0, "SIGKILL")]
)
def test_a_rank_that_is_killed_is_named_and_leaves_no_child(
    start: Start, own_model: Own, folder: Path, action: str, killed: int, name: str
) -> None:
    action = f"self.calls == 3 and rank == {killed} and (subprocess.Popen(['sleep', '600']), {action})"
    result = start("run", own_model(doing(action))).finish()  # which fails if a process is left
    assert result.code == 1
    (told,) = errors(result.err)
    assert f"error[rank-died]: rank {killed} of 2 was killed by {name}" in told
    assert (folder / "runs" / "small" / "summary.json").exists() == (killed != 0), "rank 0 writes it"


def test_ranks_that_hang_are_named_and_not_those_that_wait(start: Start, own_model: Own, folder: Path) -> None:
    action = "rank == 1 and os.kill(os.getpid(), signal.SIGSTOP); rank == 2 and time.sleep(3600)"
    three = ("parallel.dp=3", "batch.global_size=3", "limits.collective_timeout_s=4")
    result = start("run", own_model(doing(action)), changes=three).finish(90)
    assert result.code == 1
    (told,) = errors(result.err)
    assert "error[rank-hung]: rank 1 of 3 did not respond: it is stopped" in told
    assert f"rank 2 of 3 did not respond: it was at {folder / 'own.py'}:{FIRST_LINE}" in told
    assert "rank 0 waited for it: " in told


# -- torchrun ----------------------------------------------------------------------------------------------------------


def test_torchrun_s_root_cause_is_the_rank_that_failed_first(start: Start, own_model: Own) -> None:
    action = "rank == 1 and self.calls == 3 and [][1]"
    result = start("run", own_model(doing(action)), torchrun=()).finish()
    assert result.code == 1
    root = result.err[result.err.index("Root Cause") :]
    assert re.search(r"rank +: 1 ", root), root
    assert "IndexError: list index out of range" in root, root


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize(("shell", "told"), [("2>&1 | head -n 1", 1), ("2>&- | head -n 1", 0)])
def test_a_run_goes_on_when_nobody_reads(plan: Path, folder: Path, shell: str, told: int) -> None:
    command = f"{sys.executable} -m train_cli run plan.toml --set parallel.dp=1 --set run.steps=30 {shell}"
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "SLEY_TEST_PROGRAM": str(folder)}
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=folder, env=environ, capture_output=True, timeout=60)
    assert_none_left(lambda: processes_with("SLEY_TEST_PROGRAM", str(folder)), within_s=5)
    assert done.returncode == 0, done
    found = summary(folder)
    assert (found["outcome"], found["steps"]) == ("finished", 30)
    assert len(found["notes"]) == told, found["notes"]
    assert (folder / "runs" / "small" / "metrics.jsonl").read_text("utf-8").startswith('{"step": 1,')


# -- disks -------------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_told_with_its_file(cli: Cli, own_model: Own, folder: Path) -> None:
    """The first thing that could not be written, though the summary cannot be either."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    action = "self.calls == 9 and resource.setrlimit(resource.RLIMIT_FSIZE, (20, resource.RLIM_INFINITY))"
    try:
        result = cli("run", own_model(doing(action)), "--set", "parallel.dp=1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (told,) = errors(result.err)
    assert "error[metrics-file]: cannot write to `runs/small/metrics.jsonl`: File too large" in told


def test_a_summary_that_cannot_be_written_is_no_bug(cli: Cli, plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(rank, "write_json", full)
    result = cli("run", plan, "--set", "parallel.dp=1")
    assert result.code == 1
    (told,) = errors(result.err)
    assert "error[cannot-write]: cannot write `runs/small/summary.json`: No space left on device" in told
    assert "bug" not in told


def test_a_folder_that_is_deleted_is_noticed_at_the_next_step(cli: Cli, own_model: Own, folder: Path) -> None:
    action = "self.calls == 9 and __import__('shutil').rmtree('runs')"
    result = cli("run", own_model(doing(action)), "--set", "parallel.dp=1")
    assert result.code == 1
    (told,) = errors(result.err)
    assert "error[metrics-file]: `runs/small/metrics.jsonl` was deleted while the run wrote to it" in told


@pytest.mark.campaign
def test_a_run_whose_temporary_files_were_tidied_away_ends_after_its_last_step(
    cli: Cli, own_model: Own, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher does not wait for what nobody will write there any more."""
    temporary = folder / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    action = f"rank == 1 and self.calls == 5 and __import__('shutil').rmtree({str(temporary)!r})"
    result = cli("run", own_model(doing(action)))
    assert not temporary.exists()
    assert (result.code, summary(folder)["outcome"]) == (0, "finished"), result.err


# -- a signal, and a step that does not end ----------------------------------------------------------------------------


def test_a_launcher_says_from_time_to_time_that_a_step_has_not_ended() -> None:
    said: list[str] = []
    signals = _SignalForwarder(said.append, exit_codes())
    signals.remind()
    assert said == [], "nobody asked"
    signals.first = signal.SIGINT
    signals._first_signal_s = signals._last_reminder_s = time.monotonic() - 11
    signals.remind()
    signals.remind()
    assert said == ["still in this step after 11 s; Ctrl-C again stops at once"]

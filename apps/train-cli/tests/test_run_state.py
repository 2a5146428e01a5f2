"""`doctor` derives the state and the last step of a run from its rows, lock, summary and records."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sley_core.files import write_json
from sley_doctor.work_record import Start, format_line
from train_cli.run_folder import WORK, FolderLock

Cli = Callable[..., Any]


def set_old_times(run_folder: Path) -> None:
    then = time.time() - 960
    os.utime(run_folder / "metrics.jsonl", (then, then))


def write_record(run_folder: Path, rank: int, **changes: Any) -> None:
    """Writes the record of a rank that started 16 minutes ago."""
    start = Start(rank, 2, 0, socket.gethostname(), 1, "cpu", time.time() - 960)
    (run_folder / WORK).mkdir(exist_ok=True)
    with (run_folder / WORK / f"rank-{rank}.jsonl").open("a") as file:
        file.write(format_line(replace(start, **changes)))


@pytest.fixture
def ended(folder: Path) -> Path:
    """The folder of a run that was interrupted after two steps, 16 minutes ago."""
    run_folder = folder / "runs" / "small"
    run_folder.mkdir(parents=True)
    (run_folder / "plan.toml").write_text('source_folder = "."', "utf-8")
    (run_folder / "metrics.jsonl").write_text('{"step": 101}\n{"step": 102}\n', "utf-8")
    set_old_times(run_folder)
    write_json(run_folder / "summary.json", {"outcome": "interrupted", "steps": 2})
    return run_folder


def state(cli: Cli, run_folder: Path) -> str:
    return str(json.loads(cli("doctor", run_folder, "--format", "json").out)["state"]["state"])


def test_summaries_and_records_of_earlier_starts_do_not_count(cli: Cli, ended: Path) -> None:
    write_record(ended, 0)
    assert state(cli, ended) == "interrupted"
    write_record(ended, 1, time=time.time() + 100)
    assert state(cli, ended) == "killed", "a rank started later"
    write_record(ended, 1)
    with (ended / "metrics.jsonl").open("a") as file:
        file.write('{"step": 103}\n')
    set_old_times(ended)
    assert state(cli, ended) == "killed", "the summary is older than the last row"
    (ended / "summary.json").unlink()
    for rank, host, expected in ((1, "elsewhere", "killed"), (0, "elsewhere", "unknown"), (0, socket.gethostname(), "killed")):
        write_record(ended, rank, host=host)
        assert state(cli, ended) == expected, "rank 0 owns the folder"


def test_unreadable_rows_are_an_error(cli: Cli, ended: Path) -> None:
    (ended / "metrics.jsonl").unlink()
    (ended / "metrics.jsonl").mkdir()
    for form in ("text", "json"):
        result = cli("doctor", ended, "--format", form)
        assert result.code == 2
        assert "no-run" in result.err
        assert f"the files in `{ended}` cannot be read: Is a directory" in result.err


def test_the_state_depends_on_rows_lock_and_summary(cli: Cli, folder: Path) -> None:
    run_folder = folder / "runs" / "small"
    run_folder.mkdir(parents=True)
    (run_folder / "plan.toml").write_text('source_folder = "."', "utf-8")
    assert "it was killed; no step was finished\n" in cli("doctor", run_folder).out
    (run_folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st', "utf-8")
    lock = FolderLock(run_folder)
    last_step = r"all ranks finished step 2, \d s ago\n"
    assert re.search("the run is still running; " + last_step, cli("doctor", run_folder).out)
    lock.release()
    unknown = (
        "no process on this host holds the run's lock: it may be running on another host, or was killed (repeat this command in"
    )
    assert re.search(f"{re.escape(unknown)} .*; {last_step}", cli("doctor", run_folder).out)
    set_old_times(run_folder)
    killed = "no process on this host holds the run's lock: it was killed; all ranks finished step 2, 16 min ago, but none"
    assert killed in cli("doctor", run_folder).out
    write_json(run_folder / "summary.json", {"outcome": "finished", "steps": 2})
    output = json.loads(cli("doctor", run_folder, "--format", "json").out)
    assert (output["state"]["state"], output["state"]["step"]) == ("finished", 2)
    assert (output["slow"], output["why_not"]) == ([], "no rank has recorded a step")

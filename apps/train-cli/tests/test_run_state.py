"""How far `doctor` says a run has come, and whether it is under way: from its rows, its lock, its summary and its records."""

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

from sley_core.json_text import write_json
from sley_doctor.reports.work_record import Start, format_line
from train_cli.run_folder import WORK, FolderLock

Cli = Callable[..., Any]


def long_ago(made: Path) -> None:
    then = time.time() - 960
    os.utime(made / "metrics.jsonl", (then, then))


def record_of(made: Path, rank: int, **more: Any) -> None:
    """Writes what a rank has recorded in its last start, which lies long ago."""
    start = Start(rank, 2, 0, socket.gethostname(), 1, "cpu", time.time() - 960)
    (made / WORK).mkdir(exist_ok=True)
    with (made / WORK / f"rank-{rank}.jsonl").open("a") as file:
        file.write(format_line(replace(start, **more)))


@pytest.fixture
def ended(folder: Path) -> Path:
    """The folder of a run that was interrupted after two steps, long ago."""
    made = folder / "runs" / "small"
    made.mkdir(parents=True)
    (made / "plan.toml").write_text('source_folder = "."', "utf-8")
    (made / "metrics.jsonl").write_text('{"step": 101}\n{"step": 102}\n', "utf-8")
    long_ago(made)
    write_json(made / "summary.json", {"outcome": "interrupted", "steps": 2})
    return made


def state(cli: Cli, made: Path) -> str:
    return str(json.loads(cli("doctor", made, "--format", "json").out)["state"]["state"])


def test_the_summary_of_an_earlier_start_says_nothing_of_a_run_that_was_resumed(cli: Cli, ended: Path) -> None:
    record_of(ended, 0)
    assert state(cli, ended) == "interrupted"
    with (ended / "metrics.jsonl").open("a") as file:
        file.write('{"step": 103}\n')
    long_ago(ended)
    assert state(cli, ended) == "killed"


def test_nor_where_a_rank_has_started_since_and_taken_the_same_steps_again(cli: Cli, ended: Path) -> None:
    record_of(ended, 0)
    record_of(ended, 1, time=time.time() + 100)
    assert state(cli, ended) == "killed"


def test_whether_a_run_of_another_host_is_under_way_is_not_known(cli: Cli, ended: Path) -> None:
    (ended / "summary.json").unlink()
    record_of(ended, 1, host="elsewhere")
    assert state(cli, ended) == "unknown"
    record_of(ended, 0)
    assert state(cli, ended) == "killed", "rank 0 has the folder, and was here"
    record_of(ended, 0, host="elsewhere")
    assert state(cli, ended) == "unknown"


def test_rows_that_cannot_be_read_are_an_error_with_a_name(cli: Cli, ended: Path) -> None:
    (ended / "metrics.jsonl").unlink()
    (ended / "metrics.jsonl").mkdir()
    for form in ("text", "json"):
        said = cli("doctor", ended, "--format", form)
        assert said.code == 2
        assert "no-run" in said.err
        assert f"the files in `{ended}` cannot be read: Is a directory" in said.err


def test_how_far_a_run_has_come_is_told_by_its_rows_its_lock_and_its_summary(cli: Cli, folder: Path) -> None:
    made = folder / "runs" / "small"
    made.mkdir(parents=True)
    (made / "plan.toml").write_text('source_folder = "."', "utf-8")
    assert "it was killed; no step was finished\n" in cli("doctor", made).out
    (made / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st', "utf-8")
    lock = FolderLock(made)
    came = r"all ranks finished step 2, \d s ago\n"
    assert re.search("the run is still running; " + came, cli("doctor", made).out)
    lock.release()
    not_known = (
        "no process on this host holds the run's lock: it may be running on another host, or was killed (repeat this command in"
    )
    assert re.search(f"{re.escape(not_known)} .*; {came}", cli("doctor", made).out)
    long_ago(made)
    killed = "no process on this host holds the run's lock: it was killed; all ranks finished step 2, 16 min ago, but none"
    assert killed in cli("doctor", made).out
    write_json(made / "summary.json", {"outcome": "finished", "steps": 2})
    told = json.loads(cli("doctor", made, "--format", "json").out)
    assert (told["state"]["state"], told["state"]["step"]) == ("finished", 2)
    assert (told["slow"], told["why_not"]) == ([], "no rank has recorded a step")

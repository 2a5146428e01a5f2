"""metrics.jsonl: one object per line, there as soon as it is written, never cut off."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sley_core.config import JsonlConfig, check_metrics
from sley_core.errors import RunError
from sley_core.metrics.jsonl import JsonlWriter
from sley_core.metrics.jsonl import rows as rows_of
from sley_core.plan.load import plan_from_dict
from sley_core.protocols import MetricsWriter
from sley_testing.plans import small_plan

ROW: dict[str, float | int] = {"step": 1, "loss": 5.5, "tokens": 4096, "lr": 3e-4}


def rows(folder: Path) -> list[object]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_one_object_per_line_in_the_order_of_its_keys(tmp_path: Path) -> None:
    writer = JsonlWriter(JsonlConfig(), tmp_path)
    writer.write(ROW)
    writer.write(ROW | {"step": 2})
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 1, "loss": 5.5, "tokens": 4096, "lr": 0.0003}\n{"step": 2, "loss": 5.5, "tokens": 4096, "lr": 0.0003}\n'
    )
    writer.close()
    writer.close()
    assert isinstance(writer, MetricsWriter)


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    writer = JsonlWriter(JsonlConfig(), tmp_path)
    writer.write({"step": 1, "loss": math.nan, "grad_norm": math.inf, "lr": -math.inf})
    writer.close()
    assert rows(tmp_path) == [{"step": 1, "loss": None, "grad_norm": None, "lr": None}]


def test_rows_are_added_to_what_is_there(tmp_path: Path) -> None:
    for step in (1, 2):
        writer = JsonlWriter(JsonlConfig(), tmp_path)
        writer.write({"step": step})
        writer.close()
    assert rows(tmp_path) == [{"step": 1}, {"step": 2}]


def test_a_half_line_spoils_no_other(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    writer = JsonlWriter(JsonlConfig(), tmp_path)
    writer.write({"step": 2})
    writer.close()
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == ['{"step": 1}', '{"st', '{"step": 2}']


def test_a_killed_process_keeps_its_rows(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, signal, sys\n"
        "from sley_core.config import JsonlConfig\n"
        "from sley_core.metrics.jsonl import JsonlWriter\n"
        "writer = JsonlWriter(JsonlConfig(), pathlib.Path(sys.argv[1]))\n"
        "for step in range(3): writer.write({'step': step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -signal.SIGKILL
    assert rows(tmp_path) == [{"step": 0}, {"step": 1}, {"step": 2}]


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"none/metrics\.jsonl`: No such file") as error:
        JsonlWriter(JsonlConfig(), tmp_path / "none")
    assert error.value.diagnostics[0].code == "metrics-file"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_an_error_with_the_files_name(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    writer = JsonlWriter(JsonlConfig(), tmp_path)
    with pytest.raises(RunError, match=r"metrics\.jsonl`: No space left"):
        writer.write(ROW)
    writer.close()


def test_a_run_that_goes_on_takes_later_rows_back(tmp_path: Path) -> None:
    """And goes on writing where they were; a half line at the end goes with them."""
    writer = JsonlWriter(JsonlConfig(), tmp_path)
    for step in (1, 2, 3):
        writer.write(ROW | {"step": step})
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    again = JsonlWriter(JsonlConfig(), tmp_path)
    again.rewind(1)
    again.write(ROW | {"step": 2, "loss": 4.0})
    assert list(rows_of(tmp_path)) == [ROW, ROW | {"step": 2, "loss": 4.0}]
    again.rewind(0)
    assert list(rows_of(tmp_path)) == []
    again.close()


def test_a_writer_that_is_listed_twice_is_refused() -> None:
    plan = plan_from_dict(small_plan(metrics=[{"use": "core.jsonl"}, {"use": "core.jsonl"}]))
    (problem,) = check_metrics(plan)
    assert (problem.code, problem.path) == ("metrics-twice", ("metrics", 1))

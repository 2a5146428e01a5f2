"""How a run ends after a signal, a hanging rank or a full disk. No process is left."""

import json
import os
import re
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from acting_model import FIRST_LINE, doing
from started_program import Cli, Start

from sley_core.run_folder import read_rows
from sley_core.weight_files.read import WeightFiles
from sley_doctor.fault_report import read_reports
from train_cli import rank

pytestmark = pytest.mark.timeout(180)

Own = Callable[[str], Path]

LONG = ("run.steps=1000000", "run.log_every=1")


def error_line(text: str) -> str:
    """Returns the only line with an error."""
    (line,) = [line for line in text.splitlines() if "error[" in line]
    return line


def summary(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "runs" / "small" / "summary.json").read_text("utf-8"))
    return content


# -- signals -----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("dp", "number", "code"),
    [(2, signal.SIGINT, 130), (1, signal.SIGTERM, 143), (1, signal.SIGHUP, 129), (2, signal.SIGHUP, 129)],
)
def test_a_signal_stops_a_run_after_its_step(
    start: Start, cli: Any, plan: Path, folder: Path, dp: int, number: int, code: int
) -> None:
    program = start("run", plan, changes=[*LONG, f"parallel.dp={dp}"])
    program.wait_for("step 3/")
    os.kill(program.process.pid, number)
    result = program.finish(40).expect(code, "interrupted: ", "  weights        runs/small/weights\n")
    assert result.err.count("stopping after this step") == 1
    assert "error" not in result.err
    steps = summary(folder)["steps"]
    assert summary(folder)["outcome"] == "interrupted"
    assert "head.norm.weight" in WeightFiles(folder / "runs" / "small" / "weights").names
    assert [row["step"] for row in read_rows(folder / "runs" / "small")] == list(range(1, steps + 1))
    exported = cli("export", "runs/small", "--format", "huggingface", "--out", folder / "out")
    exported.expect(0, f"the weights of step {steps} in", "transformers computes the run's logits")


def test_a_second_interrupt_ends_a_run_at_once(start: Start, own_model: Own) -> None:
    program = start("run", own_model(doing("os.write(2, b'in a step\\n'); time.sleep(3600)")))
    program.wait_for("in a step")
    os.kill(program.process.pid, signal.SIGINT)
    program.wait_for("stopping after this step")
    os.kill(program.process.pid, signal.SIGINT)
    assert program.finish(30).code == 130


def test_ranks_end_with_a_killed_launcher(start: Start, plan: Path) -> None:
    program = start("run", plan, changes=LONG)
    program.wait_for("step 3/")
    os.kill(program.process.pid, signal.SIGKILL)
    assert program.finish(40).code == -signal.SIGKILL  # `finish` fails if a process is left


def test_a_signal_in_a_factory_is_no_error_of_the_factory(start: Start, own_model: Own) -> None:
    wait = r"""
    if "RANK" in os.environ:
        os.write(2, b"in the factory\n")
        time.sleep(3600)"""
    program = start("run", own_model(doing("pass").replace("def layers():", f"def layers():{wait}")))
    program.wait_for("in the factory")
    os.kill(program.process.pid, signal.SIGTERM)
    assert "error[" not in program.finish(40).expect(143).err


# -- ranks -------------------------------------------------------------------------------------------------------------


def test_hanging_ranks_are_named_and_waiting_ranks_are_not(start: Start, own_model: Own, folder: Path) -> None:
    action = "rank == 1 and os.kill(os.getpid(), signal.SIGSTOP); rank == 2 and time.sleep(3600)"
    source = doing(action, DUPLICATE_SIGNAL_S=0.2, SIGTERM_INTERVAL_S=0.5, SECOND_SIGTERM_TIMEOUT_S=0.5)
    three = ("parallel.dp=3", "batch.global_size=3", "limits.collective_timeout_s=4")
    result = start("run", own_model(source), changes=three).finish(90).expect(1)
    line = error_line(result.err)
    assert "error[rank-hung]: rank 1 of 3 did not respond: it is stopped" in line
    assert f"rank 2 of 3 did not respond: it was at {folder / 'own.py'}:{FIRST_LINE}" in line
    assert "rank 0 waited for its peers: " in line
    (attempt,) = read_reports(folder / "runs" / "small")
    assert {report.rank: report.kind for report in attempt.ranks}[2] == "stuck"


def test_torchrun_names_the_rank_that_failed_first(start: Start, own_model: Own) -> None:
    result = start("run", own_model(doing("rank == 1 and self.calls == 3 and [][1]")), torchrun=()).finish().expect(1)
    root_cause = result.err[result.err.index("Root Cause") :]
    assert re.search(r"rank +: 1 ", root_cause), root_cause
    assert "IndexError: list index out of range" in root_cause, root_cause


# -- disks -------------------------------------------------------------------------------------------------------------


def test_the_error_of_a_full_disk_names_the_file(cli: Cli, own_model: Own, folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    action = "self.calls == 9 and resource.setrlimit(resource.RLIMIT_FSIZE, (20, resource.RLIM_INFINITY))"
    try:
        result = cli("run", own_model(doing(action)), "--set", "parallel.dp=1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "error[metrics-file]: cannot write to `runs/small/metrics.jsonl`: File too large" in error_line(result.err)


def test_a_summary_that_cannot_be_written_is_an_error(cli: Cli, plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: Path, content: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(rank, "write_json", write)
    result = cli("run", plan, "--set", "parallel.dp=1").expect(1)
    line = error_line(result.err)
    assert "error[cannot-write]: cannot write `runs/small/summary.json`: No space left on device" in line
    assert "bug" not in line


def test_a_deleted_run_folder_is_an_error_of_the_next_step(cli: Cli, own_model: Own, folder: Path) -> None:
    action = "self.calls == 9 and __import__('shutil').rmtree('runs')"
    result = cli("run", own_model(doing(action)), "--set", "parallel.dp=1").expect(1)
    expected = "error[metrics-file]: `runs/small/metrics.jsonl` was deleted while the run wrote to it"
    assert expected in error_line(result.err)

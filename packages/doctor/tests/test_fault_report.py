"""What a rank says of its failure comes back as it was written, and is never in the way of the failure itself."""

import os
import threading
import time
from typing import Any

import pytest
import torch

from sley_core.comm.world import World
from sley_core.errors import Diagnostic, RunError
from sley_core.topology import Topology
from sley_doctor import fault_report
from sley_doctor.fault_report import (
    DoctorRecorder,
    ExchangeRecord,
    FaultReport,
    LaunchReport,
    WaitRecord,
    read_reports,
    write_report,
)

EXCHANGE = ExchangeRecord("all-reduce", "a bucket", "stage[0, 1]", (0, 1), "stage main", 7, 64)
POSITION = {"step": 3, "finished": "F0.0", "pending": "B0.0", "layer": "blocks.1"}
EXCHANGES = {"wait": WaitRecord(EXCHANGE, 4.5, "late", 0), "exchanges": {"stage main": (EXCHANGE,)}}
STACKS = {"MainThread": ("a line", "another")}
REPORT = FaultReport(1, 2, "error", 5.0, "collective-failed", "it failed", **POSITION, **EXCHANGES, stacks=STACKS)
RECORDER = DoctorRecorder()
DIAGNOSTIC = Diagnostic("own-code", "ValueError: no good", hint="mend it")


def test_reports_come_back_as_they_were_written(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By attempt; the first report of a rank counts, and a new run begins without any."""
    launch = LaunchReport(2, {0: 1, 1: -9}, {1: "it is stopped"}, 1)
    write_report(tmp_path, REPORT)
    write_report(tmp_path, FaultReport(1, 2, "error", 6.0, "later"))
    RECORDER.report_launch(tmp_path, launch.world, launch.codes, launch.silent, launch.first)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    write_report(tmp_path, FaultReport(0, 2, "stuck", 9.0))
    first, second = read_reports(tmp_path)
    assert (first.attempt, first.ranks, first.launch, first.unreadable) == (0, (REPORT,), launch, ())
    assert (second.attempt, [report.rank for report in second.ranks], second.launch) == (1, [0], None)
    RECORDER.delete_reports(tmp_path)
    assert read_reports(tmp_path) == []


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 2}', '{"format": 1, "rank": 0}'])
def test_a_damaged_report_is_named_and_hides_no_other(tmp_path: Any, text: str) -> None:
    write_report(tmp_path, REPORT)
    (tmp_path / "faults" / "0" / "rank-0.json").write_text(text, "utf-8")
    (attempt,) = read_reports(tmp_path)
    assert attempt.ranks == (REPORT,)
    assert attempt.unreadable == ("rank-0.json",)


def test_a_link_in_place_of_the_folder_is_not_followed(tmp_path: Any) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").touch()
    (tmp_path / "faults").symlink_to(elsewhere)
    RECORDER.delete_reports(tmp_path)
    assert (elsewhere / "mine").exists()
    assert not (tmp_path / "faults").exists()


def only_report(folder: Any) -> FaultReport:
    (attempt,) = read_reports(folder)
    (report,) = attempt.ranks
    return report


def test_an_error_is_told_with_its_traceback_and_the_stacks_of_other_threads(tmp_path: Any) -> None:
    done, ready = threading.Event(), threading.Event()

    def idle_about() -> None:
        ready.set()
        done.wait(20)

    other = threading.Thread(target=idle_about, name="another", daemon=True)
    other.start()
    ready.wait(20)
    try:
        raise ValueError("no good")
    except ValueError as error:
        RECORDER.report_failure(tmp_path, World.alone("cpu"), DIAGNOSTIC, error)
    done.set()
    other.join()
    report = only_report(tmp_path)
    assert (report.rank, report.world, report.kind) == (0, 1, "error")
    assert (report.code, report.message, report.hint) == ("own-code", "ValueError: no good", "mend it")
    assert report.stacks["the error"][-1] == "ValueError: no good"
    assert any("idle_about" in line for line in report.stacks["another"])
    assert any("report_failure" in line for line in report.stacks["MainThread"])


def test_a_folder_that_cannot_be_written_or_hangs_is_not_in_the_way(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    RECORDER.report_failure(tmp_path / "file", World.alone("cpu"), DIAGNOSTIC, ValueError())
    monkeypatch.setattr(fault_report, "MAX_REPORT_S", 0.2)
    released, ended = threading.Event(), threading.Event()

    def hang(*_: Any) -> None:
        released.wait(60)
        ended.set()

    monkeypatch.setattr(fault_report, "write_report", hang)
    RECORDER.report_hang(tmp_path, World.alone("cpu"), DIAGNOSTIC)
    assert not ended.is_set(), "it was waited for"
    released.set()
    assert ended.wait(60)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


LIMIT_S = 1.0


def diverge(folder: Any) -> str:
    """Two sums together, and one of rank 0 alone; rank 1 comes too late to answer."""
    rank = int(os.environ["RANK"])
    with World.join("cpu", timeout_s=20) as world:
        groups = world.make_groups(Topology.from_sizes(2), LIMIT_S)
        for name in ("one", "two"):
            groups["all"].all_reduce(torch.ones(2), label=name).wait()
        if rank == 1:
            time.sleep(LIMIT_S + 1.0)
            return ""
        groups.progress.step_progress.begin_step(4)
        groups.progress.step_progress.begin_entry("B0.1")
        try:
            groups["all"].all_reduce(torch.ones(4), label="three").wait()
        except RunError as error:
            RECORDER.report_failure(folder, world, error.diagnostics[0], error)
            return error.diagnostics[0].code
    return ""


def test_a_wait_that_runs_out_of_time_is_told_with_what_came_before_it(ranks: Any, tmp_path: Any) -> None:
    assert ranks(2)(diverge, tmp_path)[0] == "collective-failed"
    report = only_report(tmp_path)
    assert (report.rank, report.stage, report.step) == (0, 0, 4)
    assert (report.finished, report.pending) == ("the beginning of the step", "B0.1")
    assert report.wait is not None
    assert report.wait.end == "late"
    assert LIMIT_S * 0.9 < report.wait.seconds < LIMIT_S + 10, "the time limit ends it"
    assert str(report.wait.exchange) == "all-reduce of three over all[0, 1]"
    assert (report.wait.exchange.number, report.wait.exchange.num_bytes) == (3, 16)
    assert [exchange.label for exchange in report.exchanges["all main"]] == ["one", "two", "three"]

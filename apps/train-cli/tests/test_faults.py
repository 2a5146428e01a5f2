"""The failure that is shown of several, the report of a rank, and the two forms of diagnostics."""

import io
import json
import signal
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest

from sley_core.errors import Diagnostic, Place, PlanError, RunError
from train_cli.console import Settings, format_diagnostics, print_fault
from train_cli.faults import _SLEY_MODULES, FailedRank, Fault, find_cause, report_hang, write_error_file


def failure(rank: int, code: int, at: float) -> FailedRank:
    return FailedRank(rank, code, None, at)


def reported(rank: int, error: Exception, at: float, code: int = 1) -> FailedRank:
    return FailedRank(rank, code, replace(Fault.from_error(error), exit_code=code), at)


KILLED, ABORTED = -signal.SIGKILL, -signal.SIGABRT
CLOSED = RunError("collective-failed", "connection closed by peer")
BAD = RunError("bad-token", "token 999")
LATE = RunError("collective-failed", "the exchange with rank 1 did not end within 5 s")
SILENT, STOPPED, PLACE = " did not respond: ", "it is stopped, for example by SIGSTOP", "it was at own.py:13"


def late(rank: int, code: str) -> FailedRank:
    return reported(rank, RunError(code, PLACE), 13.0, 143)


@pytest.mark.parametrize(
    ("failures", "silent", "rank", "message"),
    [
        ([reported(0, CLOSED, 10.98), failure(1, KILLED, 11)], {}, 1, " was killed by SIGKILL"),
        ([reported(0, BAD, 10.0), failure(1, KILLED, 40)], {}, 0, ": token 999"),  # killed long after
        ([reported(0, CLOSED, 12.5), reported(3, BAD, 12.1)], {}, 3, ": token 999"),
        ([failure(0, ABORTED, 10), reported(1, BAD, 10.2)], {}, 1, ": token 999"),  # peers abort
        # Whatever the peers' clocks say.
        *(([reported(0, CLOSED, at), failure(1, ABORTED, 11)], {}, 1, " was killed by SIGABRT") for at in (10.2, 9.0, 3600.0)),
        ([reported(0, CLOSED, 10.0), failure(1, KILLED, 4000)], {}, 1, " was killed by SIGKILL"),
        ([reported(0, CLOSED, 10.0), reported(1, BAD, 4000.0)], {}, 1, ": token 999"),
        ([failure(1, 7, 1), failure(0, 143, 2)], {}, 1, " exited with code 7 and left no report"),
        ([reported(0, BAD, 5.0), failure(1, KILLED, 20)], {1: ""}, 0, ": token 999"),  # rank 1 hung, without a cause
        ([reported(0, LATE, 5.0), reported(1, LATE, 6.0), failure(3, KILLED, 20)], {3: STOPPED}, 3, SILENT + STOPPED),
        ([reported(0, LATE, 5.0), late(1, "rank-waiting"), late(2, "rank-late")], {}, 2, SILENT + PLACE),  # busy
        ([reported(0, LATE, 5.0), late(1, "rank-waiting")], {}, 0, f": {LATE.diagnostics[0].message}"),
    ],
)
def test_the_first_failure_is_shown(failures: list[FailedRank], silent: dict[int, str], rank: int, message: str) -> None:
    fault = find_cause(failures, 4, silent)
    assert [diagnostic.message for diagnostic in fault.diagnostics] == [f"rank {rank} of 4{message}"]
    assert fault.exit_code == 1


def test_equal_failures_of_all_ranks_are_shown_once() -> None:
    wrong = PlanError("model-init", "no first value")
    fault = find_cause([reported(0, wrong, 1.0, 3), reported(1, wrong, 1.1, 3)], 2)
    assert ([diagnostic.message for diagnostic in fault.diagnostics], fault.exit_code) == (["no first value"], 3)


def test_ranks_that_a_signal_ended_have_no_diagnostics() -> None:
    (interrupted,) = find_cause([reported(0, CLOSED, 5.0), failure(1, 130, 5)], 4).diagnostics
    assert interrupted.message == "only rank 1 of 4 was interrupted"
    assert find_cause([failure(0, 130, 1), failure(1, 130, 1)], 2) == Fault((), 130)
    assert find_cause([failure(1, -signal.SIGTERM, 1)], 2) == Fault((), 143)


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "deleted folder" / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


def test_the_first_report_is_kept_and_read(report: Path) -> None:
    fault = Fault((Diagnostic("code", "message", ("a", 0), Place("plan.toml", 3, 4, 5), "source", "hint"),), 3, "trace")
    write_error_file(fault)
    write_error_file(Fault((), 1, "a later report"))
    content = json.loads(report.read_text("utf-8"))
    assert FailedRank.read(1, 3, report) == FailedRank(1, 3, fault, ANY)
    assert "error[code]: message" in content["message"]["extraInfo"]["py_callstack"], "torchrun shows it"
    report.write_text('{"message": "<NONE>"}', "utf-8")
    assert FailedRank.read(1, 3, report).fault is None, "of another program"


def test_torchrun_gets_a_later_time_for_failures_of_peers(report: Path) -> None:
    """torchrun shows the rank that failed first, in whole seconds, and notices a death after its peers have reported."""
    infos = []
    for error in (CLOSED, ZeroDivisionError("no")):
        write_error_file(Fault.from_error(error))
        infos.append(json.loads(report.read_text("utf-8"))["message"]["extraInfo"])
        report.unlink()
    assert int(infos[0]["timestamp"]) >= int(infos[1]["timestamp"]) + 5
    assert infos[1]["py_callstack"] == "ZeroDivisionError: no\n"


def test_a_full_disk_leaves_no_partial_report(report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fill_disk)
    write_error_file(Fault.from_error(ValueError("no")))
    assert list(report.parent.iterdir()) == []


def test_a_late_rank_reports_its_place(report: Path) -> None:
    report_hang()
    fault = FailedRank.read(1, 3, report).fault
    assert fault is not None
    assert fault.diagnostics[0].code == "rank-late"
    assert "test_a_late_rank_reports_its_place" in fault.trace


def test_all_packages_of_the_repository_are_known() -> None:
    folders = (Path(__file__).parents[3] / "packages").glob("*/src/*/__init__.py")
    assert {file.parent.name for file in folders} <= _SLEY_MODULES


ALLOCATION_ERROR = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError(ALLOCATION_ERROR), "out-of-memory"),
        (MemoryError(), "out-of-memory"),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), "torch-broken"),
        (ImportError("libcudart.so.12: cannot open shared object file", name="torch._C"), "torch-broken"),
        (OSError(28, "No space left on device"), "cannot-write"),
        (OSError(30, "Read-only file system", "runs/a/plan.toml"), "cannot-write"),
        (KeyError("ours"), "internal-error"),
    ],
)
def test_errors_of_the_machine_have_codes(error: Exception, code: str) -> None:
    (diagnostic,) = Fault.from_error(error).diagnostics
    assert diagnostic.code == code


# -- forms of diagnostics ----------------------------------------------------------------------------------------------

TYPO = Diagnostic(
    "unknown-key",
    "`buckt_mb` is not an option of `dp.bucketed`",
    path=("gradient_handlers", 0, "buckt_mb"),
    place=Place("plan.toml", 24, 1, 8),
    source_line="buckt_mb = 25",
    hint="did you mean `bucket_mb`?",
)
DIED = Diagnostic("rank-died", "rank 1 of 2 was killed by SIGKILL")


def test_the_full_form_has_the_source_line() -> None:
    assert format_diagnostics([TYPO], is_long=True).splitlines() == [
        "error[unknown-key]: `buckt_mb` is not an option of `dp.bucketed`",
        "  --> plan.toml:24:1",
        "   |",
        "24 | buckt_mb = 25",
        "   | ^^^^^^^^",
        "   |",
        "",
        "hint: did you mean `bucket_mb`?",
        "",
    ]
    assert format_diagnostics([DIED], is_long=True) == "error[rank-died]: rank 1 of 2 was killed by SIGKILL\n\n"


def test_the_short_form_is_one_line_per_error() -> None:
    assert format_diagnostics([TYPO, DIED, Diagnostic("code", "two\nlines")], is_long=False).splitlines() == [
        "plan.toml:24:1: error[unknown-key]: `buckt_mb` is not an option of `dp.bucketed` (hint: did you mean `bucket_mb`?)",
        "error[rank-died]: rank 1 of 2 was killed by SIGKILL",
        "error[code]: two lines",
        "found 3 errors",
    ]


@pytest.mark.parametrize(
    ("line", "column", "length", "carets"), [("\tlr = 3", 7, 1, "      ^"), ("lr = 3", 1, 2, "^^"), ("", 1, 1, "^")]
)
def test_carets_are_below_the_error(line: str, column: int, length: int, carets: str) -> None:
    diagnostic = Diagnostic("code", "message", place=Place("plan.toml", 3, column, length), source_line=line)
    expected = [f"3 | {line}".replace("\t", " "), f"  | {carets}"]
    assert format_diagnostics([diagnostic], is_long=True).splitlines()[3:5] == expected


def test_control_characters_are_replaced() -> None:
    diagnostic = Diagnostic("code", "a\x1b[31mb", place=Place("p", 1, 1), source_line="k\x1b[2J = 1", hint="h\x07")
    for is_long in (True, False):
        assert not {"\x1b", "\x07"} & set(format_diagnostics([diagnostic], is_long=is_long))


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_full_form_is_for_terminals(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr("sys.stderr", stream)
    print_fault(Fault((TYPO,), 3), Settings())
    assert ("-->" in stream.getvalue()) == is_terminal

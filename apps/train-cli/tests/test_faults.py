"""Which of several failures is shown, and how a rank reports its own."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sley_core.errors import Diagnostic, Place, PlanError, RunError
from train_cli.faults import _OWN, Fault, blame, read_report, write_late_report, write_report


@dataclass
class Failure:
    exitcode: int
    timestamp: int
    error_file_data: dict[str, Any] = field(default_factory=dict)


def reported(error: Exception, at: float, code: int = 1) -> Failure:
    diagnostics = [vars(each) for each in Fault.of(error).diagnostics]
    fault = {"diagnostics": diagnostics, "exit_code": code, "trace": "the trace"}
    return Failure(code, int(at), {"sley": {"fault": fault, "time": at}})


KILLED = -signal.SIGKILL
CLOSED = RunError("collective-failed", "connection closed by peer")
BAD = RunError("bad-token", "token 999")
LATE = RunError("collective-failed", "the exchange with rank 1 did not come within 5 s")
STOPPED = "it is stopped, as by SIGSTOP"


def late(code: str) -> Failure:
    return reported(RunError(code, "it was at own.py:13"), 13.0, 143)


@pytest.mark.parametrize(
    ("failures", "silent", "message"),
    [
        pytest.param(
            {0: reported(CLOSED, 10.98), 1: Failure(KILLED, 11)}, {}, "rank 1 of 4 was killed by SIGKILL", id="killed"
        ),
        pytest.param({0: reported(BAD, 10.0), 1: Failure(KILLED, 40)}, {}, "rank 0 of 4: token 999", id="killed long after"),
        pytest.param({0: reported(CLOSED, 12.5), 3: reported(BAD, 12.1)}, {}, "rank 3 of 4: token 999", id="the first report"),
        pytest.param(
            {0: Failure(-signal.SIGABRT, 10), 1: reported(BAD, 10.2)}, {}, "rank 1 of 4: token 999", id="aborted peers"
        ),
        # Whatever the peers' clocks say.
        *(
            pytest.param({0: reported(CLOSED, when), 1: Failure(-signal.SIGABRT, 11)}, {}, "rank 1 of 4 was killed by SIGABRT")
            for when in (10.2, 9.0, 3600.0)
        ),
        pytest.param({0: reported(CLOSED, 10.0), 1: Failure(KILLED, 4000)}, {}, "rank 1 of 4 was killed by SIGKILL"),
        pytest.param({0: reported(CLOSED, 10.0), 1: reported(BAD, 4000.0)}, {}, "rank 1 of 4: token 999"),
        pytest.param({1: Failure(7, 1), 0: Failure(143, 2)}, {}, "rank 1 of 4 left with exit code 7 and said nothing"),
        pytest.param({0: reported(CLOSED, 5.0), 1: Failure(130, 5)}, {}, "rank 1 of 4 was interrupted alone"),
        pytest.param({0: reported(BAD, 5.0), 1: Failure(KILLED, 20)}, {1: ""}, "rank 0 of 4: token 999", id="hung, no cause"),
        pytest.param(
            {0: reported(LATE, 5.0), 1: reported(LATE, 6.0), 3: Failure(KILLED, 20)},
            {3: STOPPED},
            f"rank 3 of 4 did not answer: {STOPPED}",
        ),
        pytest.param(
            {0: reported(LATE, 5.0), 1: late("rank-waiting"), 2: late("rank-late")},
            {},
            "rank 2 of 4 did not answer: it was at own.py:13",
            id="busy, and not waiting",
        ),
        pytest.param({0: reported(LATE, 5.0), 1: late("rank-waiting")}, {}, f"rank 0 of 4: {LATE.diagnostics[0].message}"),
    ],
)
def test_one_failure_is_blamed(failures: dict[int, Failure], silent: dict[int, str], message: str) -> None:
    fault = blame(failures, 4, silent)
    assert [each.message for each in fault.diagnostics] == [message]
    assert fault.exit_code == 1


def test_what_all_ranks_say_is_said_once() -> None:
    wrong = PlanError("model-init", "no first value")
    fault = blame({0: reported(wrong, 1.0, 3), 1: reported(wrong, 1.1, 3)}, 2)
    assert ([each.message for each in fault.diagnostics], fault.exit_code) == (["no first value"], 3)


def test_ranks_that_obeyed_a_signal_are_quiet() -> None:
    assert blame({0: Failure(130, 1), 1: Failure(130, 1)}, 2) == Fault((), 130)
    assert blame({1: Failure(-signal.SIGTERM, 1)}, 2) == Fault((), 143)


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "a folder that was tidied away" / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


def test_a_report_comes_back_as_the_first_that_was_written(report: Path) -> None:
    fault = Fault((Diagnostic("code", "message", ("a", 0), Place("plan.toml", 3, 4, 5), "source", "hint"),), 3, "trace")
    write_report(fault)
    write_report(Fault((), 1, "a later one"))
    content = json.loads(report.read_text("utf-8"))
    found = read_report(content)
    assert found is not None
    assert found[0] == fault
    assert "error[code]: message" in content["message"]["extraInfo"]["py_callstack"], "what torchrun shows"
    assert read_report({"message": "<NONE>"}) is None, "another program's"


def test_torchrun_gets_the_trace_of_an_unexpected_error_and_a_later_time_of_its_consequences(report: Path) -> None:
    """It shows the rank that failed first, in whole seconds, and notices a dead rank only after its peers have reported."""
    infos = []
    for error in (CLOSED, ZeroDivisionError("no")):
        write_report(Fault.of(error))
        infos.append(json.loads(report.read_text("utf-8"))["message"]["extraInfo"])
        report.unlink()
    assert int(infos[0]["timestamp"]) >= int(infos[1]["timestamp"]) + 5
    assert infos[1]["py_callstack"] == "ZeroDivisionError: no\n"


def test_a_report_that_a_full_disk_cuts_is_none(report: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    write_report(Fault.of(ValueError("no")))
    assert list(report.parent.iterdir()) == []


def test_a_late_rank_says_where_it_is(report: Path) -> None:
    write_late_report()
    found = read_report(json.loads(report.read_text("utf-8")))
    assert found is not None
    assert found[0].diagnostics[0].code == "rank-late"
    assert "test_a_late_rank_says_where_it_is" in found[0].trace


def test_every_package_of_this_repository_is_our_own() -> None:
    folders = (Path(__file__).parents[3] / "packages").glob("*/src/*/__init__.py")
    assert {file.parent.name for file in folders} <= _OWN

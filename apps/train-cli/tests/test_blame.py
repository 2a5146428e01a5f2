"""Which of several failures is told."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sley_core.errors import Diagnostic, Place, PlanError, RunError
from train_cli import failure_file
from train_cli.blame import blame
from train_cli.faults import _OWN, Fault


@dataclass
class Failure:
    exitcode: int
    timestamp: int
    error_file_data: dict[str, Any] = field(default_factory=dict)


def reported(error: Exception, at: float, code: int = 1) -> Failure:
    fields = {"place": None, "path": (), "source_line": None, "hint": None, "code": "", "message": ""}
    diagnostics = [{**fields, **vars(each)} for each in Fault.of(error).diagnostics]
    fault = {"diagnostics": diagnostics, "exit_code": code, "trace": "the trace"}
    return Failure(code, int(at), {"sley": {"fault": fault, "time": at}})


CLOSED = RunError("collective-failed", "connection closed by peer")


def test_a_killed_rank_comes_before_what_its_peers_say() -> None:
    fault = blame({0: reported(CLOSED, 10.98), 1: Failure(-signal.SIGKILL, 11)}, 2)
    assert [each.message for each in fault.diagnostics] == ["rank 1 of 2 was killed by SIGKILL"]
    assert fault.exit_code == 1


def test_a_rank_that_had_to_be_killed_long_after_is_not_the_cause() -> None:
    fault = blame({0: reported(RunError("not-finite", "loss nan"), 10.0), 1: Failure(-signal.SIGKILL, 40)}, 2)
    assert fault.diagnostics[0].code == "not-finite"


def test_the_first_report_counts_and_says_whose_it_is() -> None:
    fault = blame({0: reported(CLOSED, 12.5), 3: reported(RunError("bad-token", "token 999"), 12.1)}, 4)
    assert [each.message for each in fault.diagnostics] == ["rank 3 of 4: token 999"]
    assert fault.trace == "the trace"


def test_what_all_ranks_say_is_said_once() -> None:
    wrong = PlanError("model-init", "no first value")
    fault = blame({0: reported(wrong, 1.0, 3), 1: reported(wrong, 1.1, 3)}, 2)
    assert [each.message for each in fault.diagnostics] == ["no first value"]
    assert fault.exit_code == 3


def test_aborted_peers_are_not_to_blame() -> None:
    fault = blame({0: Failure(-signal.SIGABRT, 10), 1: reported(RunError("bad-token", "token 999"), 10.2)}, 2)
    assert fault.diagnostics[0].code == "bad-token"


@pytest.mark.parametrize("when", [10.2, 9.0, 3600.0])
def test_a_rank_that_aborts_is_the_cause_where_others_only_lost_it(when: float) -> None:
    """Whatever its peers' clocks say."""
    fault = blame({0: reported(CLOSED, when), 1: Failure(-signal.SIGABRT, 11)}, 2)
    assert [each.message for each in fault.diagnostics] == ["rank 1 of 2 was killed by SIGABRT"]


def test_what_a_machine_refuses_is_said_with_the_way_round_it():
    (problem,) = blame({0: Failure(-signal.SIGILL, 10)}, 2).diagnostics
    assert problem.message == "rank 0 of 2 was killed by SIGILL"
    assert "ONEDNN_MAX_CPU_ISA" in problem.hint


def test_what_peers_lost_is_never_the_cause_beside_one() -> None:
    """A launcher that slept, or a clock that was set back: the times say nothing."""
    fault = blame({0: reported(CLOSED, 10.0), 1: Failure(-signal.SIGKILL, 4000)}, 2)
    assert fault.diagnostics[0].message == "rank 1 of 2 was killed by SIGKILL"
    fault = blame({0: reported(CLOSED, 10.0), 1: reported(ValueError("no"), 4000.0)}, 2)
    assert fault.diagnostics[0].message.startswith("rank 1 of 2: ValueError: no")


LATE = RunError("collective-failed", "the exchange with rank 1 did not come within 5 s")


def late(code: str, at: float) -> Failure:
    return reported(RunError(code, "it was at own.py:13"), at, 143)


def test_ranks_that_did_not_answer_are_named() -> None:
    stopped = "it is stopped, as by SIGSTOP"
    found = {0: reported(LATE, 5.0), 1: reported(LATE, 6.0), 3: Failure(-signal.SIGKILL, 20)}
    (told,) = blame(found, 8, {3: stopped}).diagnostics
    assert (told.code, told.message) == ("rank-hung", f"rank 3 of 8 did not answer: {stopped}")
    assert told.hint == "rank 0 waited for it: the exchange with rank 1 did not come within 5 s"


def test_a_rank_that_is_busy_is_told_from_those_that_wait_for_it() -> None:
    found = {0: reported(LATE, 5.0), 1: late("rank-waiting", 13.0), 2: late("rank-late", 13.0)}
    (told,) = blame(found, 4).diagnostics
    assert told.message == "rank 2 of 4 did not answer: it was at own.py:13"
    (told,) = blame({0: reported(LATE, 5.0), 1: late("rank-waiting", 13.0)}, 4).diagnostics
    assert told.message.startswith("rank 0 of 4: the exchange")


def test_a_hung_rank_is_not_the_cause_of_another_ones_error() -> None:
    found = {0: reported(RunError("not-finite", "loss nan"), 5.0), 1: Failure(-signal.SIGKILL, 20)}
    assert blame(found, 2, {1: ""}).diagnostics[0].code == "not-finite"


def test_a_rank_that_interrupts_itself_is_named() -> None:
    assert "rank 1 of 2 was interrupted" in blame({0: reported(CLOSED, 5.0), 1: Failure(130, 5)}, 2).diagnostics[0].message


def test_ranks_that_obeyed_a_signal_are_quiet() -> None:
    assert blame({0: Failure(130, 1), 1: Failure(130, 1)}, 2) == Fault((), 130)
    assert blame({1: Failure(-signal.SIGTERM, 1)}, 2) == Fault((), 143)


def test_a_rank_that_leaves_without_a_word() -> None:
    fault = blame({1: Failure(7, 1), 0: Failure(143, 2)}, 2)
    assert "rank 1 of 2 left with exit code 7" in fault.diagnostics[0].message


def test_a_report_comes_back_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    diagnostic = Diagnostic("code", "message", ("a", 0), Place("plan.toml", 3, 4, 5), "source", "hint")
    fault = Fault((diagnostic,), 3, "trace")
    failure_file.write(fault)
    failure_file.write(Fault((), 1, "a later one"))
    content = json.loads(path.read_text("utf-8"))
    found = failure_file.read(content)
    assert found is not None
    assert found.fault == fault
    # What torchrun shows of it.
    assert "error[code]: message" in content["message"]["extraInfo"]["py_callstack"]


def test_torchrun_is_given_the_trace_of_what_nobody_expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    failure_file.write(Fault.of(ZeroDivisionError("no")))
    assert json.loads(path.read_text("utf-8"))["message"]["extraInfo"]["py_callstack"] == "ZeroDivisionError: no\n"


def test_a_file_by_another_program_is_no_report() -> None:
    assert failure_file.read({"message": "<NONE>"}) is None


def test_torchrun_is_told_a_later_time_of_what_only_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows whoever failed first, in whole seconds, and sees a rank dead only after its peers have."""
    times = []
    for number, error in enumerate((CLOSED, ValueError("no"))):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"{number}.json"))
        failure_file.write(Fault.of(error))
        content = json.loads((tmp_path / f"{number}.json").read_text("utf-8"))
        times.append(int(content["message"]["extraInfo"]["timestamp"]))
    assert times[0] >= times[1] + 5


def test_a_report_is_left_though_its_folder_was_tidied_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gone" / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    failure_file.write(Fault.of(ValueError("no")))
    assert [each.name for each in path.parent.iterdir()] == ["error.json"]


def test_a_report_that_a_full_disk_cuts_is_none_and_the_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a file would be read as another program's, or not at all; elastic then knows the exit code alone."""

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr("os.fsync", full)
    failure_file.write(Fault.of(ValueError("no")))
    assert list(tmp_path.iterdir()) == []
    fault = blame({0: reported(CLOSED, 10.0), 1: Failure(1, 11)}, 2)
    assert [each.message for each in fault.diagnostics] == ["rank 1 of 2 left with exit code 1 and said nothing"]


def test_a_late_rank_says_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    failure_file.write_late()
    found = failure_file.read(json.loads((tmp_path / "error.json").read_text("utf-8")))
    assert found is not None
    assert failure_file.is_late(found.fault)
    assert not failure_file.is_waiting(found.fault)
    assert "test_a_late_rank_says_where_it_is" in found.fault.trace


def test_every_package_of_this_repository_is_our_own() -> None:
    folders = (Path(__file__).parents[3] / "packages").glob("*/src/*/__init__.py")
    assert {file.parent.name for file in folders} <= _OWN

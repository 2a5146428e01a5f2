"""Figures come into one table beside their targets, and a target that is missed is told by the exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from sley_testing.figures import PLACE, Figure, main, note, noted

REPORT = """<testsuites><testsuite tests="4"><testcase name="test_one"/><testcase name="test_two"><skipped/></testcase>
<testcase name="test_three"><failure message="no"/></testcase><testcase name="test_four"/></testsuite></testsuites>"""


def test_nothing_is_noted_where_nobody_asks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(PLACE, raising=False)
    note(Figure("some", "1"))
    assert noted(tmp_path / "none") == []
    assert main([str(tmp_path / "none")]) == 1, "a table of nothing shows nothing"


def test_a_table_has_each_figure_beside_its_target(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "figures"
    monkeypatch.setenv(PLACE, str(place))
    note(Figure("offload", "0.97", ">= 0.95", is_met=True))
    note(Figure("seconds", "0.1 s"))
    assert main([str(place)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "figure   found  target",
        "-------  -----  -------  ---",
        "offload  0.97   >= 0.95  met",
        "seconds  0.1 s           -",
    ]
    note(Figure("bytes", "+4 %", "within 3 %", is_met=False))
    assert main([str(place)]) == 1
    assert "NOT MET" in capsys.readouterr().out


@pytest.mark.parametrize(("report", "told"), [(REPORT, "2 passed, 1 failed, 1 skipped"), (None, "no report")])
def test_tests_are_told_with_them(tmp_path: Path, capsys: pytest.CaptureFixture[str], report: str | None, told: str) -> None:
    if report is not None:
        (tmp_path / "tests.xml").write_text(report)
    assert main([str(tmp_path / "none"), "--tests", str(tmp_path / "tests.xml")]) == 1
    found = capsys.readouterr().out
    assert told in found
    assert ("test_three" in found) == (report is not None)


def test_skipped_tests_alone_meet_nothing(tmp_path: Path) -> None:
    """As on a machine without a device."""
    (tmp_path / "tests.xml").write_text('<testsuite><testcase name="one"><skipped/></testcase></testsuite>')
    assert main([str(tmp_path / "none"), "--tests", str(tmp_path / "tests.xml")]) == 1


def test_a_figure_that_never_came_is_not_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "figures.jsonl"
    monkeypatch.setenv("SLEY_FIGURES", str(place))
    note(Figure("offload of a run", "0.97", ">= 0.95", is_met=True))
    assert main([str(place), "--expect", "offload"]) == 0
    assert main([str(place), "--expect", "offload", "onload"]) == 1
    assert "not measured" in capsys.readouterr().out

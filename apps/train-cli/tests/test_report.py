"""The page about runs: everything in it comes from their folders, it asks for nothing else, and it stays small."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from started_program import Result

from sley_core.metrics.jsonl import rows
from sley_doctor.reports.fault_report import LaunchReport, write_launch_report

Cli = Callable[..., Result]

SECTIONS = ("summary", "curves", "waiting", "memory", "counts", "plan", "machine")
HELD_OUT = 'data.held_out_files=["plan.toml"]'
ALONE = ("parallel.dp=1", "evaluation.every=2", "evaluation.steps=1", HELD_OUT)


class Page(HTMLParser):
    """The text of each section, the charts (an `<svg>` each) of each, and every address that the page names."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: dict[str, str] = {}
        self.pictures: dict[str, int] = {}
        self.addresses: list[str] = []
        self._section = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "section":
            self._section = dict(attrs)["id"] or ""
        if tag == "svg":
            self.pictures[self._section] = self.pictures.get(self._section, 0) + 1
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset")]
        assert tag not in ("script", "iframe", "object", "img"), f"a <{tag}> could ask for something"

    def handle_data(self, data: str) -> None:
        self.texts[self._section] = self.texts.get(self._section, "") + data


@pytest.fixture
def run(cli: Cli, plan: Path) -> Path:
    """A run of four steps on one rank, with two evaluations."""
    assert cli("run", plan, "--no-progress", changes=ALONE).code == 0
    return plan.parent / "runs" / "small"


def test_a_report_tells_what_the_run_has_left(cli: Cli, run: Path) -> None:
    told = cli("report", run)
    assert (told.code, told.out) == (0, ""), told.err
    html = (run / "report.html").read_text("utf-8")
    found = Page(html)
    assert all(address.startswith(("#", "data:,")) for address in found.addresses), found.addresses
    assert "url(http" not in html
    assert "@import" not in html
    assert found.texts.keys() >= set(SECTIONS)
    last, summary = list(rows(run))[-1], json.loads((run / "summary.json").read_text("utf-8"))
    assert f"{last['loss']:,.6g}" in found.texts["summary"]
    assert f"{summary['held_out_loss']:,.6g}" in found.texts["summary"]
    assert found.pictures == {"curves": 10}
    assert "plan.toml:7:1" in found.texts["plan"], "the file and line of run.steps"
    assert "--set #1" in found.texts["plan"]
    start = json.loads((run / "start.json").read_text("utf-8"))
    assert start["machine"]["platform"] in found.texts["machine"]
    assert "optimizer_states" in found.texts["memory"]


def test_a_report_without_its_libraries_says_what_to_install(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = cli("report", folder)
    assert (told.code, "no-run" in told.err) == (2, True)
    monkeypatch.setattr("sley_doctor.commands.report.find_spec", lambda name: None)
    told = cli("report", folder)
    assert (told.code, "report-missing" in told.err) == (4, True)
    assert 'pip install -e "packages/doctor[report]"' in told.err


def test_a_run_that_failed_before_its_first_step_has_a_report_of_its_faults(run: Path, cli: Cli) -> None:
    for name in ("summary.json", "metrics.jsonl", "start.json"):
        (run / name).unlink()
    assert cli("report", run).code == 0
    assert "not ended" in Page((run / "report.html").read_text("utf-8")).texts["summary"]
    write_launch_report(run, LaunchReport(2, {1: -signal.SIGKILL}, {}, 1))
    assert cli("report", run).code == 0
    found = Page((run / "report.html").read_text("utf-8"))
    assert "failed" in found.texts["summary"]
    assert "rank 1 was killed by SIGKILL" in found.texts["faults"]
    assert found.pictures == {}
    assert found.texts["curves"].count("No run has recorded this metric.") == 7

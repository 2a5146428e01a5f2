"""`report` writes a page from the files of a run; the page loads no other resource."""

import json
import signal
from html.parser import HTMLParser
from pathlib import Path

import pytest
from started_program import Cli

from sley_core.run_folder import read_rows
from sley_doctor.fault_report import DoctorRecorder

SECTIONS = ("summary", "curves", "waiting", "memory", "counts", "plan", "machine")
HELD_OUT = 'data.held_out_files=["plan.toml"]'
ALONE = ("parallel.dp=1", "evaluation.every=2", "evaluation.steps=1", HELD_OUT)


class Page(HTMLParser):
    """The text and the number of charts (`<img>`) of each section, and all addresses of the page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: dict[str, str] = {}
        self.charts: dict[str, int] = {}
        self.addresses: list[str] = []
        self._section = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "section":
            self._section = dict(attrs)["id"] or ""
        if tag == "img":
            self.charts[self._section] = self.charts.get(self._section, 0) + 1
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset")]
        assert tag not in ("script", "iframe", "object"), f"<{tag}> may load a resource"

    def handle_data(self, data: str) -> None:
        self.texts[self._section] = self.texts.get(self._section, "") + data


@pytest.fixture
def run(cli: Cli, plan: Path) -> Path:
    """A run of four steps on one rank, with two evaluations."""
    assert cli("run", plan, changes=ALONE).code == 0
    return plan.parent / "runs" / "small"


def test_a_report_has_the_results_of_the_run(cli: Cli, run: Path) -> None:
    result = cli("report", run)
    assert (result.code, result.out) == (0, ""), result.err
    html = (run / "report.html").read_text("utf-8")
    page = Page(html)
    assert all(address.startswith(("#", "data:")) for address in page.addresses), page.addresses
    assert "url(http" not in html
    assert "@import" not in html
    assert page.texts.keys() >= set(SECTIONS)
    last, summary = list(read_rows(run))[-1], json.loads((run / "summary.json").read_text("utf-8"))
    assert f"{last['loss']:,.6g}" in page.texts["summary"]
    assert f"{summary['held_out_loss']:,.6g}" in page.texts["summary"]
    assert page.charts == {"curves": 10}
    assert "plan.toml:7:1" in page.texts["plan"], "the file and line of run.steps"
    assert "--set #1" in page.texts["plan"]
    start = json.loads((run / "start.json").read_text("utf-8"))
    assert start["machine"]["platform"] in page.texts["machine"]
    assert "optimizer_states" in page.texts["memory"]


def test_a_missing_library_is_named(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("report", folder).expect(2, "no-run")
    monkeypatch.setattr("sley_doctor.commands.find_spec", lambda name: None)
    cli("report", folder).expect(4, "report-missing", 'pip install -e "packages/doctor[report]"')


def test_the_report_of_a_run_without_steps_has_its_faults(run: Path, cli: Cli) -> None:
    (run / "start.json").write_text('{"time": 1}', "utf-8")
    assert "start.json` is not a valid start record" in cli("report", run).err
    for name in ("summary.json", "metrics.jsonl", "start.json"):
        (run / name).unlink()
    assert cli("report", run).code == 0
    assert "not ended" in Page((run / "report.html").read_text("utf-8")).texts["summary"]
    DoctorRecorder().report_launch(run, 2, {1: -signal.SIGKILL}, {}, 1)
    assert cli("report", run).code == 0
    page = Page((run / "report.html").read_text("utf-8"))
    assert "failed" in page.texts["summary"]
    assert "rank 1 was killed by SIGKILL" in page.texts["faults"]
    assert page.charts == {}
    assert "No run has recorded a step." in page.texts["curves"]

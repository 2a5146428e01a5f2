"""The page about runs: everything in it comes from their folders, it asks for nothing else, and it stays small."""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from started_program import Result

from sley_core.actions.action import Action, Kind, Placement
from sley_core.actions.draw import chrome_trace
from sley_core.actions.simulate import TimedAction, Timeline
from sley_core.errors import UsageError
from sley_core.metrics.jsonl import rows
from sley_doctor.reports.fault_report import LaunchReport, write_launch
from sley_doctor.run_report.drawn_step import ends, placement_of, read_trace, thinned, times_of_stages
from sley_doctor.run_report.page import MAX_BYTES, RecordedRun, page

Cli = Callable[..., Result]

SECTIONS = ("summary", "curves", "step", "waiting", "memory", "counts", "plan", "machine")
HELD_OUT = 'data.held_out_files=["plan.toml"]'
ALONE = ("parallel.dp=1", "evaluation.every=2", "evaluation.steps=1", "timeline.step=3", HELD_OUT)


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
    """A run of four steps on one rank, with a drawn step and two evaluations."""
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
    assert found.pictures == {"curves": 7, "step": 1}
    assert "plan.toml:7:1" in found.texts["plan"], "the file and line of run.steps"
    assert "--set #1" in found.texts["plan"]
    start = json.loads((run / "start.json").read_text("utf-8"))
    assert start["machine"]["platform"] in found.texts["machine"]
    assert "optimizer_states" in found.texts["memory"]


def test_runs_lie_over_each_other(cli: Cli, plan: Path, run: Path) -> None:
    assert cli("run", plan, changes=(*ALONE, "run.name=other", "optimizer.lr=0.5", "run.steps=3")).code == 0
    out = plan.parent / "both.html"
    assert cli("report", run, run.parent / "other", "--out", out).code == 0
    found = Page(out.read_text("utf-8"))
    assert "small" in found.texts["curves"], "the legend"
    assert "other" in found.texts["curves"]
    assert "0.5" in found.texts["plan"]
    assert "0.001" in found.texts["plan"]
    assert found.pictures["step"] == 2


def test_a_report_without_its_libraries_says_what_to_install(cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sley_doctor.commands.report.find_spec", lambda name: None)
    told = cli("report", run)
    assert told.code == 4
    assert "report-missing" in told.err
    assert 'pip install -e "packages/doctor[report]"' in told.err


def test_a_folder_that_is_no_run(cli: Cli, folder: Path) -> None:
    told = cli("report", folder)
    assert told.code == 2
    assert "no-run" in told.err


def test_a_run_that_failed_before_its_first_step_has_a_report_of_its_faults(run: Path, cli: Cli) -> None:
    for name in ("summary.json", "metrics.jsonl", "timeline.json", "start.json"):
        (run / name).unlink()
    assert cli("report", run).code == 0
    assert "not ended" in Page((run / "report.html").read_text("utf-8")).texts["summary"]
    write_launch(run, LaunchReport(2, {1: -signal.SIGKILL}, {}, 1))
    assert cli("report", run).code == 0
    found = Page((run / "report.html").read_text("utf-8"))
    assert "failed" in found.texts["summary"]
    assert "rank 1 was killed by SIGKILL" in found.texts["faults"]
    assert found.pictures == {}
    assert found.texts["curves"].count("No run has recorded it.") == 7


LONG = [
    {"step": step, "loss": math.sin(step) + 2, "grad_norm": None if step % 7 == 0 else 1.0 * step, "lr": 1e-3}
    | {f"layer.{number}": 1.0 * step for number in range(30)}
    | {"tokens_per_s": step * 1.7, "memory_mb": 1.0 * step, "tokens": 9, "seconds": 0.1}
    for step in range(1, 2_001)
]


def test_a_long_run_on_many_ranks_stays_small() -> None:
    actions = [Action(kind, 0, micro) for micro in range(40) for kind in (Kind.FORWARD, Kind.BACKWARD)]
    spans = [
        TimedAction(stage, action, number + stage, number + stage + 0.9)
        for stage in range(16)
        for number, action in enumerate(actions)
    ]
    timelines = {title: Timeline.of(16, spans) for title in ("measured, step 5, ranks 0", "predicted: x")}
    long = RecordedRun("long", Path("runs/long"), LONG, {"run.steps": "60000"}, None, None, timelines, [], [])
    html = page([long])
    assert len(html.encode()) <= MAX_BYTES
    assert "metrics.jsonl has 13 more numbers" in html
    assert html.count("too many actions for this page") == 1
    with pytest.raises(UsageError, match="report-size"):
        page([long] * 21)


def test_thinned_curves_keep_peaks_and_gaps() -> None:
    values: list[float | None] = [1.0] * 1000
    values[500], values[700] = 99.0, None
    steps, kept = thinned(range(1, 1001), values, 60)
    assert len(kept) <= 60
    assert kept[steps.index(501)] == 99.0
    assert kept[steps.index(701)] is None
    assert thinned([1, 2], [0.0, 1.0], 60) == ([1, 2], [0.0, 1.0])


def of(stage: int, kind: Kind, micro: int, start_s: float, end_s: float) -> TimedAction:
    return TimedAction(stage, Action(kind, 0, micro), start_s, end_s)


def two_stages() -> Timeline:
    """Stage 1 waits for F of stage 0 from 0 to 2 and half a second for its message; stage 0 for the B from 2 to 6."""
    forward, backward = Kind.FORWARD, Kind.BACKWARD
    spans = [of(0, forward, 0, 0.5, 2), of(1, forward, 0, 2.5, 4), of(1, backward, 0, 4, 6), of(0, backward, 0, 6.25, 7)]
    return Timeline.of(2, spans)


def test_waits_are_told_by_whom_they_are_for() -> None:
    first, second = times_of_stages(two_stages(), Placement((0, 1)))
    assert (first.computing_s, first.waiting_s, first.way_s) == (2.25, {1: 4.0}, 0.25)
    assert (first.other_s, first.end_s) == (0.5, 0.0)
    assert (second.computing_s, second.waiting_s, second.way_s) == (3.5, {0: 2.0}, 0.5)
    assert (second.other_s, second.end_s) == (0.0, 1.0)


@pytest.mark.parametrize("stage", [0, 1])
def test_the_times_of_a_stage_add_up(stage: int) -> None:
    one = times_of_stages(two_stages(), Placement((0, 1)))[stage]
    assert one.computing_s + sum(one.waiting_s.values()) + one.way_s + one.end_s + one.other_s == pytest.approx(7)


def test_a_trace_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "timeline.json").write_text(chrome_trace({"measured, step 5": two_stages()}), "utf-8")
    found = read_trace(tmp_path / "timeline.json")
    assert found.keys() == {"measured, step 5"}
    assert [str(span.action) for span in found["measured, step 5"].spans] == ["F0.0", "B0.0", "F0.0", "B0.0"]
    assert found["measured, step 5"].makespan_s == pytest.approx(7)
    assert list(ends({**found, "measured, step 5, later": Timeline.of(1, [of(0, Kind.FORWARD, 0, 0, 9)])})) == [
        ("measured, step 5", pytest.approx(2)),
        ("measured, step 5, later", 0),
    ]


def test_the_route_is_that_of_the_first_micro_batch() -> None:
    v = [(0, 0), (1, 0), (1, 1), (0, 1)]
    spans = [TimedAction(stage, Action(Kind.FORWARD, chunk, 0), at, at + 1.0) for at, (stage, chunk) in enumerate(v)]
    assert placement_of(Timeline.of(2, spans)).route == (0, 1, 1, 0)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no Chromium here to look at the page with")
def test_a_browser_shows_it_without_a_request_or_an_error(cli: Cli, run: Path, tmp_path: Path) -> None:
    assert cli("report", run).code == 0
    address = (run / "report.html").absolute().as_uri()
    log, picture = tmp_path / "net.json", tmp_path / "page.png"
    browser = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    itself = ["--disable-background-networking", "--disable-sync", "--no-first-run", "--host-resolver-rules=MAP * ~NOTFOUND"]
    noted = ["--enable-logging=stderr", f"--log-net-log={log}", f"--screenshot={picture}", "--window-size=1280,1600"]
    command = [*browser, *itself, *noted, address]
    done = subprocess.run(command, timeout=60, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    events = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
    # What the browser asks for by itself belongs to other sites.
    asked = [event["url"] for event in events if str(event.get("network_isolation_key", "")).startswith("file:")]
    assert asked == []
    pixels = pytest.importorskip("PIL.Image").open(picture).convert("RGB")
    colours = pixels.getcolors(1 << 20) or []
    assert len(colours) > 20, "a page of one colour shows nothing"
    assert any(colour == (31, 119, 180) for _, colour in colours), "the first curve's blue"

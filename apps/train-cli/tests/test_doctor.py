"""`doctor` names the rank and the place of a fault; a failed run leaves no process and no shared memory."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sley_doctor.fault_report import DoctorRecorder, FaultReport, read_reports, write_report
from sley_doctor.verdict import Verdict, find_verdict
from train_cli.run_folder import FAULTS

pytestmark = pytest.mark.timeout(600)

Start = Callable[..., Any]
Cli = Callable[..., Any]

OWN = Path(__file__).parent / "own"
LIMIT_S = 10.0
"""The time limit of exchanges, which includes the start of ranks on a busy machine."""

PLAN = f"""\
plan = 1
run = {{ name = "small", steps = 6, device = "cpu", log_every = 100 }}
model = {{ factory = "breaking_parts:layers" }}
data = {{ use = "data.text", files = ["corpus.txt"], sequence = 16 }}
batch = {{ global_size = 8, micro_size = 1 }}
optimizer = {{ use = "core.sgd", lr = 0.01 }}
limits = {{ collective_timeout_s = {LIMIT_S} }}
"""
LAYOUTS = {
    "dp 2": 'parallel = { dp = 2 }\ngradient_handlers = [{ use = "dp.bucketed", bucket_mb = 0.001 }]\n',
    "pp 2": 'parallel = { pp = 2, dp = 1 }\npipeline = { use = "pp.one_f_one_b" }\n',
}
VERDICTS = {"stuck": "busy", "stopped": "stopped", "killed": "killed", "raised": "error"}


class Fault(NamedTuple):
    """A fault of a type on `rank`, at the `number`-th event: a sum, a send, or an action."""

    layout: str
    type: str
    event: str
    rank: int
    number: int


FAULTS_IN_CI = [Fault("dp 2", "skipped", "sum", 1, 9), Fault("dp 2", "killed", "action", 1, 50)]
FAULTS_IN_CAMPAIGN = [
    Fault("dp 2", "raised", "action", 1, 50),
    Fault("pp 2", "skipped", "send", 0, 5),
    Fault("pp 2", "wrong size", "send", 0, 5),
    Fault("dp 2", "stopped", "action", 1, 50),
    Fault("dp 2", "stuck", "action", 1, 50),
]


def message_key(label: str) -> tuple[str, ...]:
    """Returns the stages, the direction and the microbatch of a message label, which are the same on both sides."""
    words = label.replace(",", "").replace("(", "").split()
    stages = sorted(word for before, word in pairwise(words) if before == "stage")
    direction = next((word for word in words if word in ("forward", "backward")), "")
    micro = next((word for before, word in pairwise(words) if before == "microbatch"), "")
    return (*stages, direction, micro)


def names_fault(verdict: Verdict, fault: Fault, hit: str) -> bool:
    """Returns whether the verdict is about `hit`, the label of an exchange or the name of a layer."""
    if fault.event == "action":
        has_layer = fault.type in ("stopped", "killed") or verdict.layer == hit
        return verdict.kind == VERDICTS[fault.type] and verdict.ranks == (fault.rank,) and has_layer
    labels = [exchange.label for exchange in verdict.exchanges]
    if fault.event == "send":
        return message_key(hit) in map(message_key, labels)
    return any(label.startswith(hit) for label in labels)


@pytest.mark.parametrize(
    "fault",
    [*FAULTS_IN_CI, *(pytest.param(fault, marks=pytest.mark.campaign) for fault in FAULTS_IN_CAMPAIGN)],
    ids=lambda fault: f"{fault.layout}, {fault.type}",
)
def test_doctor_names_a_fault(start: Start, cli: Cli, folder: Path, fault: Fault) -> None:
    (folder / "plan.toml").write_text(PLAN + LAYOUTS[fault.layout], "utf-8")
    environ = {"SLEY_TEST_FAULT": json.dumps(fault._asdict()), "PYTHONPATH": str(OWN)}
    result = start("run", "plan.toml", **environ).finish(120)  # fails if a process is left
    assert result.code == 1, result.err
    assert fault.type != "killed" or "error[rank-died]: rank 1 of 2 was killed by SIGKILL" in result.err, result.err
    assert time.time() - (folder / "hit.json").stat().st_mtime < 2 * LIMIT_S + 5, "5 s for a busy machine"
    pids = {int(path.suffix[1:]) for path in folder.glob("process.*")}
    shared_memory = [path.name for path in Path("/dev/shm").iterdir()]
    assert not [name for name in shared_memory if set(map(int, re.findall(r"\d+", name))) & pids]

    verdict = find_verdict(read_reports(folder / "runs" / "small")[-1])
    assert names_fault(verdict, fault, json.loads((folder / "hit.json").read_text("utf-8"))), verdict
    output = cli("doctor", "runs/small")
    assert (output.code, f"cause     {verdict.cause}\n" in output.out, "remedy    " in output.out) == (0, True, True), (
        output.out
    )
    (attempt,) = json.loads(cli("doctor", "runs/small", "--format", "json").out)["attempts"]
    assert (attempt["kind"], attempt["ranks"], attempt["attempt"]) == (verdict.kind, [*verdict.ranks], 0)
    assert fault.event != "action" or fault.type == "killed" or verdict.step == 3
    assert fault.type != "stopped" or verdict.exchanges, "the peers wait in an exchange"


def test_the_next_run_replaces_old_reports(cli: Cli, plan: Path, folder: Path) -> None:
    run_folder = folder / "runs" / "small"
    write_report(run_folder, FaultReport(0, 2, "error", 1.0, "collective-failed", "it failed"))
    (run_folder / "plan.toml").write_text('source_folder = "."', "utf-8")
    assert cli("run", plan, changes=["parallel.dp=1"]).code == 0
    assert not (run_folder / FAULTS).exists()
    assert cli("run", plan).code == 3, "now it has results"


def test_each_attempt_has_a_report(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_folder = folder / "runs" / "small"
    assert cli("doctor", run_folder).code == 2
    DoctorRecorder().report_launch(run_folder, 2, {1: -9}, {}, 1)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    write_report(run_folder, FaultReport(0, 2, "error", 1.0, "own-code", "ValueError: no"))
    (run_folder / FAULTS / "1" / "rank-1.json").write_text("{", "utf-8")
    result = cli("doctor", run_folder)
    assert result.code == 0
    first, second, slow = result.out.split("\n\n")
    assert slow == "slow      unknown: no rank has recorded a step\n"
    assert first.startswith("attempt 0\ncause     rank 1 was killed by SIGKILL\n")
    assert second.startswith("attempt 1\ncause     rank 0 failed: ValueError: no\n")
    assert "could not be read: rank-1.json" in second

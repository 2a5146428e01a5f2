"""`doctor` names the rank and the place of a fault, and the state of a run; a failed run leaves no process and no shared
memory.
"""

import json
import os
import re
import socket
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from started_program import Cli

from sley_core.json_text import write_json
from sley_doctor.fault_report import DoctorRecorder, FaultReport, read_reports, write_report
from sley_doctor.verdict import Verdict, find_verdict
from sley_doctor.work_record import Start, format_line
from train_cli.run_folder import FAULTS, WORK, FolderLock

pytestmark = pytest.mark.timeout(600)


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
def test_doctor_names_a_fault(start: Any, cli: Cli, folder: Path, fault: Fault) -> None:
    (folder / "plan.toml").write_text(PLAN + LAYOUTS[fault.layout], "utf-8")
    environ = {"SLEY_TEST_FAULT": json.dumps(fault._asdict()), "PYTHONPATH": str(OWN)}
    messages = ["error[rank-died]: rank 1 of 2 was killed by SIGKILL"] if fault.type == "killed" else []
    start("run", "plan.toml", **environ).finish(120).expect(1, *messages)  # fails if a process is left
    assert time.time() - (folder / "hit.json").stat().st_mtime < 2 * LIMIT_S + 5, "5 s for a busy machine"
    pids = {int(path.suffix[1:]) for path in folder.glob("process.*")}
    shared_memory = [path.name for path in Path("/dev/shm").iterdir()]
    assert not [name for name in shared_memory if set(map(int, re.findall(r"\d+", name))) & pids]

    verdict = find_verdict(read_reports(folder / "runs" / "small")[-1])
    assert names_fault(verdict, fault, json.loads((folder / "hit.json").read_text("utf-8"))), verdict
    output = cli("doctor", "runs/small").expect(0).out
    assert all(line in output for line in (f"cause     {verdict.cause}\n", "remedy    ")), output
    (attempt,) = json.loads(cli("doctor", "runs/small", "--format", "json").out)["attempts"]
    assert (attempt["kind"], attempt["ranks"], attempt["attempt"]) == (verdict.kind, [*verdict.ranks], 0)
    assert fault.event != "action" or fault.type == "killed" or verdict.step == 3
    assert fault.type != "stopped" or verdict.exchanges, "the peers wait in an exchange"


def test_the_next_run_replaces_old_reports(cli: Cli, plan: Path, run_folder: Path) -> None:
    write_report(run_folder, FaultReport(0, 2, "error", 1.0, "collective-failed", "it failed"))
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
    result = cli("doctor", run_folder).expect(0)
    first, second, slow = result.out.split("\n\n")
    assert slow == "slow      unknown: no rank has recorded a step\n"
    assert first.startswith("attempt 0\ncause     rank 1 was killed by SIGKILL\n")
    assert second.startswith("attempt 1\ncause     rank 0 failed: ValueError: no\n")
    assert "could not be read: rank-1.json" in second


# -- the state of a run ------------------------------------------------------------------------------------------------


def set_old_times(run_folder: Path) -> None:
    then = time.time() - 960
    os.utime(run_folder / "metrics.jsonl", (then, then))


def write_record(run_folder: Path, rank: int, **changes: Any) -> None:
    """Writes the record of a rank that started 16 minutes ago."""
    start = Start(rank, 2, 0, socket.gethostname(), 1, "cpu", time.time() - 960)
    (run_folder / WORK).mkdir(exist_ok=True)
    with (run_folder / WORK / f"rank-{rank}.jsonl").open("a") as file:
        file.write(format_line(replace(start, **changes)))


@pytest.fixture
def run_folder(folder: Path) -> Path:
    """A run folder with a plan."""
    run_folder = folder / "runs" / "small"
    run_folder.mkdir(parents=True)
    (run_folder / "plan.toml").write_text('source_folder = "."', "utf-8")
    return run_folder


@pytest.fixture
def ended(run_folder: Path) -> Path:
    """The folder of a run that was interrupted after two steps, 16 minutes ago."""
    (run_folder / "metrics.jsonl").write_text('{"step": 101}\n{"step": 102}\n', "utf-8")
    set_old_times(run_folder)
    write_json(run_folder / "summary.json", {"outcome": "interrupted", "steps": 2})
    return run_folder


def state(cli: Cli, run_folder: Path) -> str:
    return str(json.loads(cli("doctor", run_folder, "--format", "json").out)["state"]["state"])


def test_summaries_and_records_of_earlier_starts_do_not_count(cli: Cli, ended: Path) -> None:
    write_record(ended, 0)
    assert state(cli, ended) == "interrupted"
    write_record(ended, 1, time=time.time() + 100)
    assert state(cli, ended) == "killed", "a rank started later"
    write_record(ended, 1)
    with (ended / "metrics.jsonl").open("a") as file:
        file.write('{"step": 103}\n')
    set_old_times(ended)
    assert state(cli, ended) == "killed", "the summary is older than the last row"
    (ended / "summary.json").unlink()
    for rank, host, expected in ((1, "elsewhere", "killed"), (0, "elsewhere", "unknown"), (0, socket.gethostname(), "killed")):
        write_record(ended, rank, host=host)
        assert state(cli, ended) == expected, "rank 0 owns the folder"


def test_unreadable_rows_are_an_error(cli: Cli, ended: Path) -> None:
    (ended / "metrics.jsonl").unlink()
    (ended / "metrics.jsonl").mkdir()
    for form in ("text", "json"):
        cli("doctor", ended, "--format", form).expect(2, "no-run", f"the files in `{ended}` cannot be read: Is a directory")


def test_the_state_depends_on_rows_lock_and_summary(cli: Cli, run_folder: Path) -> None:
    assert "the run was killed; no step was finished\n" in cli("doctor", run_folder).out
    (run_folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st', "utf-8")
    lock = FolderLock(run_folder)
    last_step = r"all ranks finished step 2, \d s ago\n"
    assert re.search("the run is still running; " + last_step, cli("doctor", run_folder).out)
    lock.release()
    unlocked = "no process on this host holds the run's lock: the run "
    unknown = r"may be running on another host, or was killed \(repeat this command in .*; "
    assert re.search(unlocked + unknown + last_step, cli("doctor", run_folder).out)
    set_old_times(run_folder)
    assert f"{unlocked}was killed; all ranks finished step 2, 16 min ago, but none" in cli("doctor", run_folder).out
    write_json(run_folder / "summary.json", {"outcome": "finished", "steps": 2})
    output = json.loads(cli("doctor", run_folder, "--format", "json").out)
    assert (output["state"]["state"], output["state"]["step"]) == ("finished", 2)
    assert (output["slow"], output["why_not"]) == ([], "no rank has recorded a step")

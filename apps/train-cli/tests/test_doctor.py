"""What is left of a run that failed, and what `doctor` says of it: nothing runs on, nothing is left in shared memory.

One thing goes wrong on one rank, drawn by a printed seed: what, in which layout, on which rank, at which exchange or action;
each kind on the first stage, on one in the middle and on the last, and others anywhere. A fault is found if the verdict names
the exchange that was hit, or the rank and the layer. Where nothing goes wrong, doctor says nothing.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from acting_model import doing

from sley_core.metrics.jsonl import rows
from sley_doctor.reports.fault_report import FaultReport, LaunchReport, read_reports, write_launch_report, write_report
from sley_doctor.verdict.verdict import Verdict, find_verdict, list_evidence
from train_cli.run_folder import FAULTS, WORK

pytestmark = pytest.mark.timeout(3600)

Start = Callable[..., Any]
Cli = Callable[..., Any]
Own = Callable[[str], Path]

OWN = Path(__file__).parent / "own"
LIMIT_S = 10.0
"""Of waits, those for the start of ranks on a busy machine among them."""

GRACE_S = 10.0
"""After the limit of waits: until then a rank that does not answer is named and ended."""

UNDER_WAY = 3
NUM_STEPS = 6

PLAN = """\
plan = 1
run = {{ name = "small", steps = {steps}, device = "cpu", log_every = 100 }}
model = {{ factory = "breaking_parts:layers" }}
data = {{ use = "data.text", files = ["{files}"], sequence = 16 }}
batch = {{ global_size = 8, micro_size = 1 }}
optimizer = {{ use = "core.sgd", lr = 0.01 }}
limits = {{ collective_timeout_s = {limit} }}
"""

BUCKETS = 'gradient_handlers = [{ use = "dp.bucketed", bucket_mb = 0.001 }]\n'
PIPE = 'pipeline = { use = "pp.one_f_one_b" }\n'
SHARDS = 'weights = { use = "isp.communicator" }\n'
LAYOUTS: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "dp 2": (2, "parallel = { dp = 2 }\n" + BUCKETS, ("sum", "action")),
    "dp 2, sockets": (2, "parallel = { dp = 2, cross_memory_attach = false }\n" + BUCKETS, ("sum", "action")),
    "dp 4": (4, "parallel = { dp = 4 }\n" + BUCKETS, ("sum", "action")),
    "pp 2": (2, "parallel = { pp = 2, dp = 1 }\n" + PIPE, ("send", "action")),
    "pp 4": (4, "parallel = { pp = 4, dp = 1 }\n" + PIPE, ("send", "action")),
    "pp 2 x dp 2": (4, "parallel = { pp = 2, dp = 2 }\n" + PIPE + BUCKETS, ("send", "sum", "action")),
    "pp 3 x dp 2": (6, "parallel = { pp = 3, dp = 2 }\n" + PIPE + BUCKETS, ("send", "sum", "action")),
    "wp 2": (2, "parallel = { dp = 2, wp = 2, cross_memory_attach = false }\n" + SHARDS, ("reduce", "gather", "action")),
    "wp 4": (4, "parallel = { dp = 4, wp = 4 }\n" + SHARDS, ("reduce", "action")),
}
"""Ranks, tables, and what can go wrong."""

STAGES = {"pp 4": 4, "pp 2 x dp 2": 2, "pp 3 x dp 2": 3}
"""How many stages the layouts have on which faults are placed by stage."""

OF_EXCHANGES = ("skipped", "extra", "wrong size", "wrong group", "slow")
OF_ACTIONS = ("slow", "stuck", "stopped", "killed", "raised")
CLEAN = frozenset({"slow", "none"})
NAMED = {"stuck": "busy", "stopped": "stopped", "killed": "killed", "raised": "error"}


KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "skipped": (("skipped",), ("send", "sum")),
    "extra": (("extra",), ("send", "sum")),
    "wrong group": (("wrong group",), ("send", "sum")),
    "wrong size": (("wrong size",), ("send", "sum")),
    "slow": (("slow",), ("send", "sum", "action")),
    "stopped": (("stopped",), ("action",)),
    "crash": (("killed", "raised"), ("action",)),
}
"""What goes wrong on each stage: which kinds of faults that may be, and of what."""


class Fault(NamedTuple):
    """What goes wrong on `rank` at the `number`-th exchange or action of the kind `of`."""

    layout: str
    kind: str
    of: str
    rank: int
    number: int


def drawn(draw: random.Random) -> Fault:
    """A fault that can be one: the group of all ranks has no channel for gathers."""
    while True:
        layout = draw.choice(list(LAYOUTS))
        world, _, of_kinds = LAYOUTS[layout]
        of = draw.choice(of_kinds)
        kind = draw.choice(OF_ACTIONS if of == "action" else OF_EXCHANGES)
        rank = draw.randrange(world)
        if kind == "wrong group" and of in ("gather", "reduce"):
            continue
        return Fault(layout, kind, of, rank, draw.randrange(3, 12))


def drawn_at(draw: random.Random, label: str, place: str) -> Fault:
    """A fault of `KINDS` on the first stage, on one in the middle, or on the last."""
    kinds, of_kinds = KINDS[label]
    of = draw.choice(of_kinds)
    layout = draw.choice([one for one, pp in STAGES.items() if of in LAYOUTS[one][2] and (pp > 2 or place != "middle")])
    pp, stage_spans = STAGES[layout], LAYOUTS[layout][0] // STAGES[layout]
    stage = {"first": 0, "middle": draw.randrange(1, max(2, pp - 1)), "last": pp - 1}[place]
    rank = stage * stage_spans + draw.randrange(stage_spans)
    # A stage may have as many sums as there are steps, and no more.
    return Fault(layout, draw.choice(kinds), of, rank, draw.randrange(3, 1 + NUM_STEPS if of == "sum" else 12))


def campaign(draw: random.Random, num: int) -> list[Fault]:
    """Faults of each kind on each stage, and others anywhere; `num` in all."""
    placed = [drawn_at(draw, label, place) for label in KINDS for place in ("first", "middle", "last")]
    return (placed + [drawn(draw) for _ in range(num - len(placed))])[:num]


def plan_of(folder: Path, layout: str) -> Path:
    path = folder / "plan.toml"
    files = folder / "corpus.txt"
    path.write_text(PLAN.format(steps=NUM_STEPS, limit=LIMIT_S, files=files) + LAYOUTS[layout][1], "utf-8")
    return path


def is_found(fault: Fault, told: Verdict, hit: str, number: int) -> bool:
    """Whether the verdict is about what was hit. number: its place among the sums of that rank."""
    if fault.of == "action":
        is_there = fault.kind in ("stopped", "killed") or told.layer == hit
        return told.kind == NAMED[fault.kind] and told.ranks == (fault.rank,) and is_there
    if fault.layout == "dp 2, sockets" and told.kind == "killed":
        # Gloo has ended one process. The other may be in another sum, since several are under way.
        return any(abs(one.number - number) <= UNDER_WAY for one in told.exchanges if one.queue == "stage main")
    names = [one.label.removesuffix(", again") for one in told.exchanges]
    return any(_is_one(hit, name) for name in names)


def _is_one(hit: str, name: str) -> bool:
    """A message has other words at either end: what it carries, of which microbatch, over which boundary."""
    return name.startswith(hit) or (" sends to " in hit and _message(hit) == _message(name))


def _message(label: str) -> tuple[str, ...]:
    words = label.replace(",", "").split()
    stages = sorted(word for before, word in pairwise(words) if before == "stage")
    flow = next((word for word in words if word in ("forward", "backward")), "")
    micro = next((word for before, word in pairwise(words) if before == "microbatch"), "")
    return (*stages, flow, micro)


def shared_memory_of(pids: set[int]) -> set[str]:
    """Names in /dev/shm that have the number of one of these processes."""
    names = {path.name for path in Path("/dev/shm").iterdir()}
    return {name for name in names if set(map(int, re.findall(r"\d+", name))) & pids}


def run(start: Start, folder: Path, fault: Fault) -> tuple[str, Verdict | None]:
    """Runs the case, which ends in time and leaves nothing in shared memory; its outcome, and what doctor says."""
    hit_file = folder / "hit.json"
    hit_file.unlink(missing_ok=True)
    told = {} if fault.kind == "none" else fault._asdict()
    environ = {"SLEY_TEST_FAULT": json.dumps(told), "PYTHONPATH": str(OWN)}
    result = start("run", plan_of(folder, fault.layout), "--overwrite", **environ).finish(120)  # fails if a process is left
    ended = time.time()
    assert not shared_memory_of({int(path.suffix[1:]) for path in folder.glob("process.*")})
    reports = read_reports(folder / "runs" / "small")
    if fault.kind in CLEAN:
        assert (result.code, reports) == (0, []), (fault, result.err)
        assert fault.kind == "none" or hit_file.exists(), f"{fault} did not happen"
        return "clean", None
    assert result.code == 1, f"{fault}\n{result.err}"
    assert hit_file.exists(), f"{fault}\n{result.err}"
    assert ended - hit_file.stat().st_mtime < LIMIT_S + GRACE_S + 5, "of which 5 for a busy machine"
    place = json.loads(hit_file.read_text("utf-8"))
    hit, number = place["what"], place.get("number", 0)
    seen = find_verdict(reports[-1])
    return ("found" if is_found(fault, seen, hit, number) else f"missed {hit}"), seen


def check_all(start: Start, folder: Path, faults: list[Fault]) -> None:
    """Runs every fault, prints it with the verdict, and fails if a verdict names another fault."""
    missed = []
    for fault in faults:
        outcome, seen = run(start, folder, fault)
        print(f"{fault}: {outcome}; {seen.cause if seen else 'nothing said'}", flush=True)
        if outcome.startswith("missed"):
            print(*list_evidence(read_reports(folder / "runs" / "small")[-1].ranks), sep="\n")
            missed.append((fault, outcome, seen))
    assert not missed, missed


GIVEN = [
    Fault("dp 2", "skipped", "sum", 1, 9),
    Fault("dp 2", "none", "action", 0, 1),
    Fault("dp 2", "killed", "action", 1, 50),
    Fault("dp 2", "raised", "action", 1, 50),
    Fault("pp 2", "skipped", "send", 0, 5),
    Fault("pp 4", "wrong size", "send", 0, 5),
    Fault("dp 2", "stopped", "action", 1, 50),
    Fault("dp 2", "stuck", "action", 1, 50),
]


@pytest.mark.parametrize(
    "fault",
    [*GIVEN[:4], *(pytest.param(fault, marks=pytest.mark.campaign) for fault in GIVEN[4:])],
    ids=lambda fault: f"{fault.layout}, {fault.kind}",
)
def test_a_fault_is_found_and_told(start: Start, cli: Cli, folder: Path, fault: Fault) -> None:
    check_all(start, folder, [fault])
    if fault.kind not in CLEAN:
        seen = find_verdict(read_reports(folder / "runs" / "small")[-1])
        said = cli("doctor", "runs/small")
        assert (said.code, f"cause     {seen.cause}\n" in said.out, "remedy    " in said.out) == (0, True, True), said.out
        (attempt,) = json.loads(cli("doctor", "runs/small", "--format", "json").out)["attempts"]
        assert (attempt["kind"], attempt["ranks"], attempt["attempt"]) == (seen.kind, [*seen.ranks], 0)
        assert fault.of != "action" or fault.kind == "killed" or seen.step == 3
        assert fault.kind != "stopped" or seen.exchanges, "in which its peers wait"


@pytest.mark.campaign
def test_any_fault_is_found(start: Start, folder: Path) -> None:
    seed = int(os.environ.get("SLEY_TEST_SEED") or random.SystemRandom().randrange(10**6))
    num = int(os.environ.get("SLEY_TEST_FAULTS") or 30)
    print(f"seed {seed}")
    check_all(start, folder, campaign(random.Random(seed), num))


# -- attempts, runs that are asked to end, and runs that were killed ---------------------------------------------------

LIMIT = ("--set", "limits.collective_timeout_s=8")

AT_THE_THIRD_STEP = """
    from pathlib import Path
    if self.calls == 5 and rank == 1 and again == "0":
        time.sleep(1)  # until the test has seen both ranks
        Path("when").write_text(str(time.time()))
        {action}
    if self.calls == 1 and rank == 0 and again == "1":
        Path("again").write_text(str(time.time()))
"""


def doing_once(action: str) -> str:
    return doing(AT_THE_THIRD_STEP.format(action=action))


RAISED = "raise ValueError('no good')"
BUSY = "time.sleep(3600)"


@pytest.mark.campaign
def test_torchrun_starts_the_ranks_again_at_once_and_both_attempts_are_told_apart(
    start: Start, own_model: Own, cli: Cli, folder: Path
) -> None:
    """The ranks of the second attempt do not read the addresses of the first in the agent's store."""
    options = ("--max-restarts", "1", "--monitor-interval", "0.1")
    result = start("run", own_model(doing_once(RAISED)), *LIMIT, torchrun=options).finish(100)
    assert result.code == 0, result.err
    seconds = float((folder / "again").read_text("utf-8")) - float((folder / "when").read_text("utf-8"))
    print(f"first step of the second attempt after {seconds:.1f} s")
    assert seconds < 40, "a wait for addresses that nobody has takes the limit of start-up, 120 s"
    rows = (folder / "runs" / "small" / "metrics.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3, 4]
    (attempt,) = json.loads(cli("doctor", "runs/small", "--format", "json").out)["attempts"]
    assert (attempt["attempt"], attempt["kind"], attempt["ranks"]) == (0, "error", [1])


def test_a_run_that_is_asked_to_end_says_where_it_was_if_it_cannot(
    start: Start, own_model: Own, cli: Cli, folder: Path
) -> None:
    unwilling = ("--set", "limits.collective_timeout_s=600", "--set", "run.final_weights=none")  # saving has 25 s
    program = start("run", own_model(doing_once(BUSY)), *unwilling)
    program.wait_for("step 2/")
    while not (folder / "when").exists():
        time.sleep(0.05)
    os.kill(program.process.pid, signal.SIGTERM)
    assert program.finish(60).code == 143
    said = cli("doctor", "runs/small").out
    assert "cause     rank 1 did not reach the others: it was at " in said
    assert "rank 0 waited for it in the " in said


def long_ago(made: Path) -> None:
    """Sets the times of rows and of windows back."""
    then = time.time() - 960
    os.utime(made / "metrics.jsonl", (then, then))
    for path in (made / WORK).iterdir():
        windows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line]
        path.write_text("".join(json.dumps({**window, "time": window["time"] - 960}) + "\n" for window in windows), "utf-8")


@pytest.mark.campaign
def test_where_ranks_were_is_told_of_a_run_that_was_killed_as_a_whole(
    start: Start, own_model: Own, cli: Cli, folder: Path
) -> None:
    """A launcher that is killed takes its ranks with it, and nobody can report anything."""
    program = start("run", own_model(doing("time.sleep(0.02)")), "--set", "run.steps=10000", "--set", "run.log_every=5")
    program.wait_for("step 25/")
    while not any((folder / "runs" / "small" / "work").glob("rank-1.jsonl")):
        time.sleep(0.05)
    under_way = json.loads(cli("doctor", "runs/small", "--format", "json").out)["state"]
    assert (under_way["state"], under_way["step"] >= 25) == ("running", True)
    os.kill(program.process.pid, signal.SIGKILL)
    program.finish(60)
    last = list(rows(folder / "runs" / "small"))[-1]["step"]
    said = cli("doctor", "runs/small").out
    assert f"or on the host of rank 0); all ranks finished step {last}, " in said
    long_ago(folder / "runs" / "small")
    said = cli("doctor", "runs/small").out
    assert f"it was killed; all ranks finished step {last}, 16 min ago, but none finished step {last + 1}" in said
    for rank in (0, 1):
        assert re.search(rf"rank {rank} \(stage 0\): (works .* ms of a step|recorded up to step \d+)", said), said


def test_reports_are_of_the_last_run_and_do_not_keep_the_next_from_its_folder(cli: Cli, plan: Path, folder: Path) -> None:
    made = folder / "runs" / "small"
    write_report(made, FaultReport(0, 2, "error", 1.0, "collective-failed", "it failed"))
    (made / "plan.toml").write_text('source_folder = "."', "utf-8")
    assert cli("run", plan, changes=["parallel.dp=1"]).code == 0
    assert not (made / FAULTS).exists()
    assert cli("run", plan).code == 3, "now it has results"


def test_attempts_damage_and_folders_that_are_none(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = folder / "runs" / "small"
    assert cli("doctor", made).code == 2
    write_launch_report(made, LaunchReport(2, {1: -9}, {}, 1))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    write_report(made, FaultReport(0, 2, "error", 1.0, "own-code", "ValueError: no"))
    (made / FAULTS / "1" / "rank-1.json").write_text("{", "utf-8")
    said = cli("doctor", made)
    assert said.code == 0
    first, second, slow = said.out.split("\n\n")
    assert slow == "slow      unknown: no rank has recorded a step\n"
    assert first.startswith("attempt 0\ncause     rank 1 was killed by SIGKILL\n")
    assert second.startswith("attempt 1\ncause     rank 0 failed: ValueError: no\n")
    assert "could not be read: rank-1.json" in second

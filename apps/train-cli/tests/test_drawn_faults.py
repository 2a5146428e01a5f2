"""One thing goes wrong on one rank, and `doctor` finds what; nothing goes wrong, and it says nothing.

Drawn by a printed seed: what goes wrong, in which layout, on which rank, at which exchange or action; each kind on the first
stage, on one in the middle and on the last, and others anywhere. A fault is found where the verdict names the exchange that was
hit, or the rank and the layer.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sley_doctor.reports.fault_report import read
from sley_doctor.verdict.verdict import Verdict, evidence, verdict

pytestmark = pytest.mark.timeout(3600)

OWN = Path(__file__).parent / "own"
LIMIT_S = 15.0
"""Of waits, those for the start of ranks on a busy machine among them."""

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
    """A fault that can be one: the group of all ranks has no lane for gathers."""
    while True:
        layout = draw.choice(list(LAYOUTS))
        world, _, of_kinds = LAYOUTS[layout]
        of = draw.choice(of_kinds)
        kind = draw.choice(OF_ACTIONS if of == "action" else OF_EXCHANGES)
        rank = draw.randrange(world)
        if kind == "wrong group" and of in ("gather", "reduce"):
            continue
        return Fault(layout, kind, of, rank, draw.randrange(3, 12))


def drawn_at(draw: random.Random, what: str, place: str) -> Fault:
    """A fault of `KINDS` on the first stage, on one in the middle, or on the last."""
    kinds, of_kinds = KINDS[what]
    of = draw.choice(of_kinds)
    layout = draw.choice([one for one, pp in STAGES.items() if of in LAYOUTS[one][2] and (pp > 2 or place != "middle")])
    pp, of_stage = STAGES[layout], LAYOUTS[layout][0] // STAGES[layout]
    stage = {"first": 0, "middle": draw.randrange(1, max(2, pp - 1)), "last": pp - 1}[place]
    rank = stage * of_stage + draw.randrange(of_stage)
    # A stage may have as many sums as there are steps, and no more.
    return Fault(layout, draw.choice(kinds), of, rank, draw.randrange(3, 1 + NUM_STEPS if of == "sum" else 12))


def campaign(draw: random.Random, num: int) -> list[Fault]:
    """Faults of each kind on each stage, and others anywhere; `num` in all."""
    placed = [drawn_at(draw, what, place) for what in KINDS for place in ("first", "middle", "last")]
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
        # Gloo has ended one process, and what the other was in may be a sum beside that one, as several are under way.
        return any(abs(one.number - number) <= UNDER_WAY for one in told.exchanges if one.queue == "stage main")
    names = [one.what.removesuffix(", again") for one in told.exchanges]
    return any(_is_one(hit, name) for name in names)


def _is_one(hit: str, name: str) -> bool:
    """A message has other words at either end: what it carries, of which micro-batch, over which boundary."""
    return name.startswith(hit) or (" sends to " in hit and _message(hit) == _message(name))


def _message(what: str) -> tuple[str, ...]:
    words = what.replace(",", "").split()
    stages = sorted(word for before, word in pairwise(words) if before == "stage")
    flow = next((word for word in words if word in ("forward", "backward")), "")
    micro = next((word for before, word in pairwise(words) if before == "micro-batch"), "")
    return (*stages, flow, micro)


def run(start: Callable[..., Any], folder: Path, fault: Fault) -> tuple[str, Verdict | None, float]:
    """Runs the case; what came of it, and what doctor says."""
    (folder / "hit.json").unlink(missing_ok=True)
    told = {} if fault.kind == "none" else fault._asdict()
    begin = time.monotonic()
    environ = {"SLEY_TEST_FAULT": json.dumps(told), "PYTHONPATH": str(OWN)}
    result = start("run", plan_of(folder, fault.layout), "--overwrite", **environ).finish(120)
    seconds = time.monotonic() - begin
    found = read(folder / "runs" / "small")
    if fault.kind in CLEAN:
        assert (result.code, found) == (0, []), (fault, result.err)
        assert fault.kind == "none" or (folder / "hit.json").exists(), f"{fault} did not happen"
        return "clean", None, seconds
    assert result.code == 1, f"{fault}\n{result.err}"
    assert (folder / "hit.json").exists(), f"{fault}\n{result.err}"
    place = json.loads((folder / "hit.json").read_text("utf-8"))
    hit, number = place["what"], place.get("number", 0)
    seen = verdict(found[-1])
    return ("found" if is_found(fault, seen, hit, number) else f"missed {hit}"), seen, seconds


def check_all(start: Callable[..., Any], folder: Path, faults: list[Fault]) -> None:
    """Runs all, prints each with what was said of it, and fails if one was missed."""
    missed = []
    for fault in faults:
        outcome, seen, seconds = run(start, folder, fault)
        print(f"{fault}: {outcome}, {seconds:.1f} s; {seen.cause if seen else 'nothing said'}", flush=True)
        if outcome.startswith("missed"):
            print(*evidence(read(folder / "runs" / "small")[-1].ranks), sep="\n")
            missed.append((fault, outcome, seen))
    assert not missed, missed


GIVEN = [
    Fault("dp 2", "skipped", "sum", 1, 9),
    Fault("pp 2", "skipped", "send", 0, 5),
    Fault("pp 4", "wrong size", "send", 0, 5),
    Fault("dp 2", "none", "action", 0, 1),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("fault", GIVEN, ids=lambda fault: f"{fault.layout}, {fault.kind}")
def test_some_faults_are_found(start: Callable[..., Any], folder: Path, fault: Fault) -> None:
    check_all(start, folder, [fault])


@pytest.mark.campaign
def test_any_fault_is_found(start: Callable[..., Any], folder: Path) -> None:
    seed = int(os.environ.get("SLEY_TEST_SEED") or random.SystemRandom().randrange(10**6))
    num = int(os.environ.get("SLEY_TEST_FAULTS") or 30)
    print(f"seed {seed}")
    check_all(start, folder, campaign(random.Random(seed), num))

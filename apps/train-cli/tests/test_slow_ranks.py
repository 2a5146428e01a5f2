"""One rank is slow in one thing, and the judgement of its run names both; nothing is slow, and it names nobody.

Drawn by a printed seed: what is slow, in which layout, on which rank, in which layer, by how much.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sley_doctor.reports.work_record import read_records
from sley_doctor.slow.describe import describe_cause, describe_work
from sley_doctor.slow.judge import Cause, Judgement, judge

pytestmark = pytest.mark.timeout(3600)

OWN = Path(__file__).parent / "own"

PLAN = """\
plan = 1
run = {{ name = "small", steps = {steps}, device = "cpu", log_every = 1000, final_weights = "none" }}
model = {{ factory = "slowed_parts:layers" }}
data = {{ factory = "slowed_parts:Samples" }}
batch = {{ global_size = {batch}, micro_size = 1 }}
optimizer = {{ factory = "slowed_parts:Sgd", lr = 0.01, scope = "elementwise" }}
limits = {{ collective_timeout_s = 60 }}
"""

BUCKETS = 'gradient_handlers = [{ use = "dp.bucketed" }]\n'
PIPE = 'pipeline = { use = "pp.one_f_one_b" }\n'
LAYOUTS = {
    "dp 2": (2, 4, "parallel = { dp = 2 }\n" + BUCKETS),
    "dp 2, sockets": (2, 4, "parallel = { dp = 2, cross_memory_attach = false }\n" + BUCKETS),
    "pp 2": (2, 2, "parallel = { pp = 2, dp = 1 }\n" + PIPE),
    "pp 2 x dp 2": (4, 4, "parallel = { pp = 2, dp = 2 }\n" + PIPE + BUCKETS),
    "wp 2": (2, 4, 'parallel = { dp = 2, wp = 2 }\nweights = { use = "isp.communicator" }\n'),
}
"""Ranks, the global batch, which gives each rank two microbatches, and tables."""

PIPELINES = frozenset({"pp 2", "pp 2 x dp 2"})
"""Of two stages, with two blocks each."""

STEPS = 40
KINDS = ("data", "forward", "backward", "optimizer", "link")

PLACES = {"data": "data", "forward": "F0", "backward": "B0", "optimizer": "update"}


class Case(NamedTuple):
    """What is slow, and by how many seconds of each step."""

    layout: str
    kind: str
    rank: int = 0
    layer: int = 0
    seconds: float = 0.0


def drawn(draw: random.Random, kind: str) -> Case:
    layout = draw.choice([one for one in LAYOUTS if kind != "link" or one == "dp 2, sockets"])
    world = LAYOUTS[layout][0]
    rank = draw.randrange(world)
    layer = draw.randrange(2) + 2 * (rank // (world // 2)) if layout in PIPELINES else draw.randrange(4)
    # A batch is read beside the step before, so only what takes longer than that step is waited for; and of links less than
    # 7.5 ms of an exchange is not told, of which a step has three.
    least, most = {"data": (0.1, 0.2), "link": (0.07, 0.15)}.get(kind, (0.03, 0.1))
    return Case(layout, kind, rank, layer, round(draw.uniform(least, most), 3))


def judged(together: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch, case: Case) -> Judgement:
    world, batch, tables = LAYOUTS[case.layout]
    path = folder / "plan.toml"
    path.write_text(PLAN.format(steps=STEPS, batch=batch) + tables, "utf-8")
    told = {} if case.kind == "none" else case._asdict()
    monkeypatch.setenv("SLEY_TEST_SLOW", json.dumps(told))
    result = together(world, "run", path, "--overwrite")
    assert result.code == 0, result.err
    return judge(read_records(folder / "runs" / "small"))


def is_named(case: Case, causes: tuple[Cause, ...]) -> bool:
    """Whether the first cause is the one of the case, and no other rank is named."""
    if not causes:
        return False
    first = causes[0]
    match case.kind:
        case "link":
            return first.kind == "link" and first.ranks == (0, 1)
        case _:
            is_there = first.ranks == (case.rank,) and first.location == PLACES[case.kind]
            has_layer = case.kind in ("data", "optimizer") or first.layer in ("", f"blocks.{case.layer}")
            return first.kind == "work" and is_there and has_layer


Judged = Callable[[Case], Judgement]


@pytest.fixture
def run(together: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Judged:
    monkeypatch.syspath_prepend(OWN)
    return lambda case: judged(together, folder, monkeypatch, case)


GIVEN = [
    Case("pp 2", "backward", 0, 1, 0.06),
    Case("dp 2", "data", 1, 0, 0.1),
    Case("dp 2", "optimizer", 1, 0, 0.06),
    Case("dp 2, sockets", "link", 0, 0, 0.06),
    Case("wp 2", "forward", 0, 2, 0.06),
    Case("dp 2", "none"),
]


@pytest.mark.sample(2)
@pytest.mark.flaky(reruns=2)  # real times, on a machine that other tests keep busy
@pytest.mark.parametrize("case", GIVEN, ids=lambda case: f"{case.layout}, {case.kind}")
def test_what_is_slow_is_named(run: Judged, case: Case) -> None:
    found = run(case)
    told = "\n".join([*map(describe_cause, found.causes), *describe_work(found)])
    assert not found.why_not
    assert is_named(case, found.causes) if case.kind != "none" else not found.causes, told


@pytest.mark.campaign
def test_anything_slow_is_named_and_nobody_where_nothing_is(run: Judged, capsys: pytest.CaptureFixture[str]) -> None:
    seed = int(os.environ.get("SLEY_TEST_SEED") or random.SystemRandom().randrange(10**6))
    num = int(os.environ.get("SLEY_TEST_SLOWDOWNS") or 30)
    draw = random.Random(seed)
    cases = [drawn(draw, KINDS[number % len(KINDS)]) for number in range(num)]
    cases += [Case(draw.choice(list(LAYOUTS)), "none") for _ in range(num)]
    wrong = []
    for case in cases:
        found = run(case)
        is_right = is_named(case, found.causes) if case.kind != "none" else not found.causes
        words = "; ".join(map(describe_cause, found.causes)) or found.why_not or "nobody"
        with capsys.disabled():  # the ranks' lines are read from what is captured
            print(f"seed {seed}: {'' if is_right else 'WRONG '}{case}: {words}", flush=True)
            if not is_right:
                print(*describe_work(found), sep="\n", flush=True)
        if not is_right:
            wrong.append((case, found.causes))
    assert not wrong, wrong

"""Slows down one part of one rank, and checks that the judgement of the run names both, or nobody without a slow part."""

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from sley_core.data.dataset import DataContext, DataInfo, Field
from sley_doctor.slow_ranks import Cause, Judgement, describe_cause, describe_work, judge
from sley_doctor.work_record import read_records
from sley_testing.habits import Embed
from train_cli.main import main

pytestmark = pytest.mark.timeout(3600)

VARIABLE = "SLEY_TEST_SLOW"
HIDDEN, SEQUENCE, VOCABULARY, NUM_BLOCKS = 64, 32, 64, 4
NUM_MICROS = 2
"""The number of microbatches of a rank in a step."""


class Slow:
    """The slow part of this rank. A process may run several cases."""

    def __init__(self) -> None:
        case = json.loads(os.environ.get(VARIABLE, "{}"))
        is_slow = bool(case) and int(os.environ.get("RANK", "0")) == case["rank"]
        self.kind = case["kind"] if is_slow else "none"
        self.layer = case.get("layer", -1)
        self.seconds = case.get("seconds", 0.0)

    def is_at(self, kind: str, layer: int) -> bool:
        return self.kind == kind and self.layer == layer


class Late(torch.autograd.Function):
    """Returns its input, and sleeps in the backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Block(nn.Module):
    def __init__(self, index: int, slow: Slow) -> None:
        super().__init__()
        self.index, self.slow = index, slow
        self.inner = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.outer = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        slow = self.slow
        output = hidden + self.outer(torch.relu(self.inner(hidden)))
        if not self.training:
            return output
        if slow.is_at("forward", self.index):
            time.sleep(slow.seconds / NUM_MICROS)
        return Late.apply(output, slow.seconds / NUM_MICROS) if slow.is_at("backward", self.index) else output  # type: ignore[no-any-return, no-untyped-call]


def layers() -> list[tuple[str, nn.Module]]:
    slow = Slow()
    blocks: list[tuple[str, nn.Module]] = [(f"blocks.{index}", Block(index, slow)) for index in range(NUM_BLOCKS)]
    return [("embed", Embed(VOCABULARY, HIDDEN)), *blocks, ("head", nn.Linear(HIDDEN, VOCABULARY))]


class Samples:
    """Samples of ascending tokens. On a rank with slow data, each sample takes its share of the seconds."""

    def __init__(self, context: DataContext) -> None:
        self.slow = Slow()
        self.info = DataInfo({"tokens": Field("int64", 0, 1), "labels": Field("int64", 0, 1)}, VOCABULARY, SEQUENCE)

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self.slow.kind == "data":
            time.sleep(self.slow.seconds / NUM_MICROS)
        tokens = (torch.arange(SEQUENCE + 1) + index) % VOCABULARY
        return {"tokens": tokens[:-1], "labels": tokens[1:]}


class Sgd(torch.optim.SGD):
    """Sleeps on a rank with a slow optimizer."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.slow = Slow()

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        if self.slow.kind == "optimizer":
            time.sleep(self.slow.seconds)
        return super().step(closure)


PLAN = """\
plan = 1
run = {{ name = "small", steps = {steps}, device = "cpu", log_every = 1000, final_weights = "none" }}
model = {{ factory = "test_slow_ranks:layers" }}
data = {{ factory = "test_slow_ranks:Samples" }}
batch = {{ global_size = {batch}, micro_size = 1 }}
optimizer = {{ factory = "test_slow_ranks:Sgd", lr = 0.01, scope = "elementwise" }}
limits = {{ collective_timeout_s = 60 }}
"""

BUCKETS = 'gradient_handlers = [{ use = "dp.bucketed" }]\n'
PIPE = 'pipeline = { use = "pp.one_f_one_b" }\n'
LAYOUTS = {
    "dp 2": (2, 4, "parallel = { dp = 2 }\n" + BUCKETS),
    "pp 2": (2, 2, "parallel = { pp = 2, dp = 1 }\n" + PIPE),
    "pp 2 x dp 2": (4, 4, "parallel = { pp = 2, dp = 2 }\n" + PIPE + BUCKETS),
    "wp 2": (2, 4, 'parallel = { dp = 2, wp = 2 }\nweights = { use = "isp.communicator" }\n'),
}
"""The number of ranks, the global batch with two microbatches per rank, and the tables."""

PIPELINES = frozenset({"pp 2", "pp 2 x dp 2"})
"""The layouts with two stages, of two blocks each."""

STEPS = 32
KINDS = ("data", "forward", "backward", "optimizer")

LOCATIONS = {"data": "data", "forward": "F0", "backward": "B0", "optimizer": "update"}


class Case(NamedTuple):
    """The slow part, and the seconds by which it prolongs each step."""

    layout: str
    kind: str
    rank: int = 0
    layer: int = 0
    seconds: float = 0.0


def draw_case(draw: random.Random, kind: str) -> Case:
    layout = draw.choice(list(LAYOUTS))
    world = LAYOUTS[layout][0]
    rank = draw.randrange(world)
    layer = draw.randrange(2) + 2 * (rank // (world // 2)) if layout in PIPELINES else draw.randrange(4)
    # A batch is read during the previous step, so ranks wait only for the excess.
    shortest, longest = (0.1, 0.2) if kind == "data" else (0.03, 0.1)
    return Case(layout, kind, rank, layer, round(draw.uniform(shortest, longest), 3))


JudgeRun = Callable[[Case], Judgement]


@pytest.fixture
def run(ranks: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> JudgeRun:
    """Runs a case and judges it."""

    def judge_run(case: Case) -> Judgement:
        world, batch, tables = LAYOUTS[case.layout]
        path = folder / "plan.toml"
        path.write_text(PLAN.format(steps=STEPS, batch=batch) + tables, "utf-8")
        monkeypatch.setenv(VARIABLE, json.dumps({} if case.kind == "none" else case._asdict()))
        assert ranks(world, 120, init=False)(main, ["run", str(path), "--overwrite"]) == [0] * world
        return judge(read_records(folder / "runs" / "small"))

    return judge_run


def is_named(case: Case, causes: tuple[Cause, ...]) -> bool:
    """Returns whether the first cause is that of the case."""
    if case.kind == "none" or not causes:
        return case.kind == "none" and not causes
    first = causes[0]
    return (first.kind, first.ranks, first.location) == ("work", (case.rank,), LOCATIONS[case.kind])


@pytest.mark.flaky(reruns=2)  # real times, on a machine that other tests keep busy
def test_the_slow_part_is_named(run: JudgeRun) -> None:
    """The campaign draws other parts and layouts, and runs without a slow part."""
    case = Case("pp 2", "backward", 0, 1, 0.06)
    judgement = run(case)
    assert not judgement.no_cause_reason
    assert is_named(case, judgement.causes), "\n".join([*map(describe_cause, judgement.causes), *describe_work(judgement)])


@pytest.mark.campaign
def test_drawn_slow_parts_are_named(run: JudgeRun, capsys: pytest.CaptureFixture[str]) -> None:
    seed = int(os.environ.get("SLEY_TEST_SEED") or random.SystemRandom().randrange(10**6))
    num = int(os.environ.get("SLEY_TEST_SLOWDOWNS") or 30)
    draw = random.Random(seed)
    cases = [draw_case(draw, KINDS[number % len(KINDS)]) for number in range(num)]
    cases += [Case(draw.choice(list(LAYOUTS)), "none") for _ in range(num)]
    wrong_cases = []
    for case in cases:
        judgement = run(case)
        text = "; ".join(map(describe_cause, judgement.causes)) or judgement.no_cause_reason or "nobody"
        is_wrong = not is_named(case, judgement.causes)
        with capsys.disabled():
            print(f"seed {seed}: {'WRONG ' * is_wrong}{case}: {text}", flush=True)
            if is_wrong:
                print(*describe_work(judgement), sep="\n", flush=True)
        wrong_cases += [case] * is_wrong
    assert not wrong_cases

"""A run that is killed at random moments and resumed has the numbers of an undisturbed run.

Each life of the run resumes from the newest checkpoint, in the same layout or in another.
"""

import json
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from layouts import layout_of, num_ranks
from started_program import LIMIT_S, Program, Start

from sley_checkpoint.reader import newest, read
from sley_core.run_folder import read_attempt
from sley_testing.plans import Tables, changed, small_plan, write_texts

NAME = "killed"
STEPS = 6
PLAN = small_plan(
    run={"name": NAME, "steps": STEPS, "device": "cpu", "seed": 7, "log_every": 100},
    model__num_layers=2,
    model__heads=2,
    model__kv_heads=None,
    data__sequence=16,
    batch={"global_size": 4, "micro_size": 1},
    optimizer__clip_norm=0.5,
    precision={"compute": "fp64"},
    checkpoint={"every_steps": 1, "keep": 2},
    averaging={"use": "optim.ema", "decay": 0.5},
)
CANONICAL = changed(PLAN, parallel={"reduction": "canonical"})
NAMES = ["alone", "dp2 bucketed", "dp2 sharded", "dp4 sharded", "pp2", "interleaved", "pp2 dp2 sharded", "wp2", "wp2 sp2"]
"""The names of layouts."""

LONGEST_S = 2.5
"""Roughly the seconds from the first line of a life to its last step."""

IsTime = Callable[[float], bool]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_texts(tmp_path)
    return tmp_path


def start_life(start: Start, folder: Path, tables: Tables, name: str) -> list[Program]:
    """Starts the ranks of one life, as torchrun would. name: a unique name of the life."""
    plan = folder / f"plan-{name}.toml"
    plan.write_text(tomli_w.dumps(tables), "utf-8")
    attempt = read_attempt(folder / tables["run"].get("folder", "runs") / NAME)
    # A run that has saved nothing starts from the beginning only if the user asks for it; `auto` does not.
    options = ["--overwrite"] if attempt is not None and attempt.saved_step < 0 else ["--resume", "auto"]
    size = num_ranks(tables)
    environ = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "SLEY_STORE": (folder / f"store-{name}").as_uri()}
    return [start("run", plan, *options, RANK=str(rank), LOCAL_RANK=str(rank), **environ) for rank in range(size)]


def live(ranks: Sequence[Program], draw: random.Random, is_time: IsTime = lambda _: False) -> bool:
    """Lets the ranks live until `is_time`, then kills one of them, and the others a moment later. Returns whether it has killed
    any rank. Raises AssertionError if a rank fails by itself.
    """
    start_s = time.monotonic()
    while any(rank.process.poll() is None for rank in ranks):
        lived_s = time.monotonic() - start_s
        assert lived_s < LIMIT_S, "\n".join(rank.err for rank in ranks)
        if is_time(lived_s):
            kill([draw.choice(ranks)])
            time.sleep(draw.choice([0.0, 0.02, 0.2]))  # the other ranks must do no harm meanwhile
            kill(ranks)
            return -signal.SIGKILL in [rank.process.wait(LIMIT_S) for rank in ranks]
        time.sleep(0.001)
    codes = [rank.process.poll() for rank in ranks]
    assert not any(codes), f"{codes}\n" + "\n".join(rank.err for rank in ranks)
    return False


def kill(ranks: Sequence[Program]) -> None:
    for rank in ranks:
        if rank.process.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(rank.process.pid, signal.SIGKILL)


def in_a_save(run: Path, draw: random.Random) -> IsTime:
    """Returns a rule that waits for the n-th save and then for a drawn time."""
    saves: set[str] = set()
    number, delay_s = draw.randint(1, 3), draw.choice([0.0, 0.0, 0.002, 0.01])
    start_s: list[float] = []

    def is_time(lived_s: float) -> bool:
        saves.update(path.name for path in run.glob("checkpoints/.saving-*"))
        if len(saves) >= number and not start_s:
            start_s.append(lived_s)
        return bool(start_s) and lived_s - start_s[0] >= delay_s

    return is_time


def anywhere(run: Path, draw: random.Random) -> IsTime:
    """Returns a rule that waits for a drawn time, or until three steps are left, since a life is short on a fast machine."""
    moment_s = draw.uniform(0.0, LONGEST_S)
    rows = run / "metrics.jsonl"
    return lambda lived_s: lived_s >= moment_s or (rows.exists() and rows.read_bytes().count(b"\n") >= STEPS - 3)


@dataclass(frozen=True)
class Results:
    """The results of a finished run. rows: without measured times. tensors: its newest checkpoint, with optimizer states."""

    rows: list[dict[str, Any]]
    tensors: dict[str, torch.Tensor]

    @classmethod
    def read(cls, run: Path) -> "Results":
        rows = map(json.loads, (run / "metrics.jsonl").read_text("utf-8").splitlines())
        checkpoint = newest(run / "checkpoints")
        assert checkpoint.path is not None, list(run.iterdir())
        assert not checkpoint.damaged_checkpoints
        saved = read(checkpoint.path)
        keys = ("step", "loss", "grad_norm", "lr")
        return cls([{key: row[key] for key in keys} for row in rows], {name: saved[name] for name in saved})


def assert_same(expected: Results, actual: Results, *, bits: bool, is_one_layout: bool) -> None:
    """Compares the rows of all steps, and the weights and optimizer states of the last checkpoint."""
    assert [row["step"] for row in actual.rows] == [row["step"] for row in expected.rows]
    # Layouts differ in what each rank keeps, such as the order of its buckets.
    first, second = (
        {name: tensor for name, tensor in results.tensors.items() if is_one_layout or not name.startswith("ranks/")}
        for results in (expected, actual)
    )
    assert first.keys() == second.keys()
    if bits:
        assert actual.rows == expected.rows
        assert all(torch.equal(first[name], second[name]) for name in first)
        return
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in actual.rows] == pytest.approx([row[key] for row in expected.rows], rel=1e-10)
    for name, tensor in first.items():
        error = torch.linalg.vector_norm(second[name] - tensor) / torch.linalg.vector_norm(tensor)
        assert error < 1e-10 or torch.equal(second[name], tensor), (name, float(error))


def check_kills(start: Start, folder: Path, seed: int, layouts: list[str], tables: Tables, num_kills: int) -> None:
    """Kills a run up to `num_kills` times, each life in one of `layouts`, and compares its results with those of an undisturbed
    run. The bits must be equal for a single layout or canonical sums.
    """
    draw, is_one_layout = random.Random(seed), len(layouts) == 1
    plan = layout_of(layouts[0] if is_one_layout else "alone", tables, run__folder="undisturbed")
    assert not live(start_life(start, folder, plan, "undisturbed"), draw)
    run = folder / "runs" / NAME
    num_killed, was_killed = 0, True
    while was_killed:
        layout, mode = draw.choice(layouts), draw.choice(["async", "sync"])
        rule = draw.choice([anywhere, in_a_save])(run, draw) if num_killed < num_kills else lambda _: False
        ranks = start_life(start, folder, layout_of(layout, tables, checkpoint__mode=mode), str(num_killed))
        was_killed = live(ranks, draw, rule)
        num_killed += was_killed
        print(f"seed {seed}, {layout}, {mode}: {'killed' if was_killed else 'ended'}")
    assert num_killed
    bits = is_one_layout or "reduction" in tables.get("parallel", {})
    expected, actual = Results.read(folder / "undisturbed" / NAME), Results.read(run)
    assert_same(expected, actual, bits=bits, is_one_layout=is_one_layout)


@pytest.mark.sample(1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("layouts", "tables"),
    [(["dp2 sharded", "wp2"], CANONICAL), (["dp2 sharded"], PLAN), (["dp2 bucketed", "wp2"], PLAN)],
    ids=["canonical", "one layout", "two layouts"],
)
def test_a_killed_run_has_the_numbers_of_an_undisturbed_one(
    start: Start, folder: Path, layouts: list[str], tables: Tables
) -> None:
    check_kills(start, folder, 3, layouts, tables, 1)


CAMPAIGN = [
    *((100 + index, [layout], PLAN) for index, layout in enumerate(NAMES)),
    *((seed, NAMES, PLAN) for seed in range(200, 208)),
    *((seed, [layout for layout in NAMES if "sp" not in layout], CANONICAL) for seed in range(300, 304)),
]


@pytest.mark.campaign
@pytest.mark.timeout(1100)
@pytest.mark.parametrize(("seed", "layouts", "tables"), CAMPAIGN, ids=[str(seed) for seed, *_ in CAMPAIGN])
def test_six_kills(start: Start, folder: Path, seed: int, layouts: list[str], tables: Tables) -> None:
    """A layout is drawn for each life."""
    check_kills(start, folder, seed, layouts, tables, 6)

"""A run that is killed at random moments and continued ends with the numbers of the run that nobody disturbed.

Each life goes on from the newest checkpoint, in the same layout or in another.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from layouts import layout_of, num_ranks

from sley_checkpoint.reader import newest, read
from sley_core.attempt import read_attempt
from sley_testing.plans import Tables, changed, small_plan, write_texts
from sley_testing.processes import ForkedProgram

NAME = "killed"
LIFE_S = 60.0
"""How long a life may take on a machine that is busy with other tests."""

STEPS = 8
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
OF_A_RANK = "ranks/"
"""How the names begin under which checkpoints have what parts of one rank keep."""

NAMES = ["alone", "dp2 bucketed", "dp2 sharded", "dp4 sharded", "pp2", "interleaved", "pp2 dp2 sharded", "wp2", "wp2 sp2"]
"""Of layouts."""

LONGEST_S = 2.5
"""About what a life takes from its first line to its last step."""


@dataclass
class Ranks:
    """The ranks of one life, as torchrun would start them; none of them is left on leaving it."""

    programs: list[ForkedProgram] = field(default_factory=list)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(range(len(self.programs)))
        for program in self.programs:
            program.wait(LIFE_S)
            program.stdout.close()
            program.stderr.close()

    @property
    def are_done(self) -> bool:
        return all(program.poll() is not None for program in self.programs)

    def abort(self) -> str:
        """Ends the ranks, and returns what each printed and the stacks in which it was."""
        for program in self.programs:
            if program.poll() is None:
                os.kill(program.pid, signal.SIGABRT)
        texts = [(program.stdout.read(), program.stderr.read()) for program in self.programs]
        return "\n".join(f"rank {rank}\n{out}\n{err}" for rank, (out, err) in enumerate(texts))

    def kill(self, ranks: Any) -> None:
        for rank in ranks:
            if self.programs[rank].poll() is None:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(self.programs[rank].pid, signal.SIGKILL)


def start(folder: Path, tables: Tables, number: int) -> Ranks:
    """Starts life `number` of the run, as its plan `tables` says."""
    world = num_ranks(tables)
    plan = folder / f"plan-{number}.toml"
    plan.write_text(tomli_w.dumps(tables), "utf-8")
    shared = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "PYTEST"))},
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "SLEY_STORE": (folder / f"store-{number}").as_uri(),
    }
    life = Ranks()
    attempt = read_attempt(folder / "runs" / NAME)
    # A run that has saved nothing starts from the beginning only if the user asks for it; `auto` does not.
    how = ["--overwrite"] if attempt is not None and attempt.saved < 0 else ["--resume", "auto"]
    for rank in range(world):
        env = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        arguments = ["run", str(plan), *how, "--no-progress"]
        life.programs.append(ForkedProgram("train_cli", arguments, cwd=folder, env=env))
    return life


def kill_in_a_save(folder: Path, draw: random.Random) -> Callable[[float], bool]:
    """Returns whether it is time: in the n-th save that is seen, a drawn moment after it began."""
    seen: set[str] = set()
    wanted, after_s = draw.randint(1, 3), draw.choice([0.0, 0.0, 0.002, 0.01])
    began: list[float] = []

    def is_time(_: float) -> bool:
        checkpoints = folder / "runs" / NAME / "checkpoints"
        seen.update(path.name for path in checkpoints.glob(".saving-*"))
        if len(seen) >= wanted and not began:
            began.append(time.monotonic())
        return bool(began) and time.monotonic() - began[0] >= after_s

    return is_time


def kill_anywhere(folder: Path, draw: random.Random, longest_s: float, last: int) -> Callable[[float], bool]:
    """Returns whether a drawn time has passed since the life began, or the run has written `last` rows: on a fast machine a
    life ends before the time has passed.
    """
    moment = draw.uniform(0.0, longest_s)
    rows = folder / "runs" / NAME / "metrics.jsonl"
    return lambda lived_s: lived_s >= moment or (rows.exists() and rows.read_bytes().count(b"\n") >= last)


def live(life: Ranks, draw: random.Random, is_time: Callable[[float], bool]) -> bool:
    """Lets the ranks live until `is_time`, then kills one of them, and the others a moment later; returns whether it did.

    Raises AssertionError for ranks that end by themselves in another way than well.
    """
    began = time.monotonic()
    while not life.are_done:
        lived_s = time.monotonic() - began
        if lived_s >= LIFE_S:
            pytest.fail(f"no end within {LIFE_S:g} s\n{life.abort()}")
        if is_time(lived_s):
            life.kill([draw.randrange(len(life.programs))])
            time.sleep(draw.choice([0.0, 0.02, 0.2]))  # what the others do meanwhile must do no harm
            life.kill(range(len(life.programs)))
            for program in life.programs:
                program.wait(LIFE_S)
            return any(program.poll() == -signal.SIGKILL for program in life.programs)
        time.sleep(0.001)
    codes = [program.poll() for program in life.programs]
    assert not any(codes), f"{codes}\n" + "\n".join(program.stderr.read() for program in life.programs)
    return False


@dataclass(frozen=True)
class End:
    """The results of a finished run. rows: without measured times. tensors: its newest checkpoint, with optimizer states."""

    rows: list[dict[str, Any]]
    tensors: dict[str, Any]


def end(folder: Path) -> End:
    """Returns what the run in `folder` came to."""
    run = folder / "runs" / NAME
    lines = (run / "metrics.jsonl").read_text("utf-8").splitlines()
    keys = ("step", "loss", "grad_norm", "lr")
    found = newest(run / "checkpoints")
    assert found.path is not None, list(run.iterdir())
    assert not found.damaged_checkpoints, found.damaged_checkpoints
    saved = read(found.path)
    return End([{key: json.loads(line)[key] for key in keys} for line in lines], {name: saved[name] for name in saved})


def undisturbed(folder: Path, tables: Tables) -> End:
    """Lets a run of its own live to its end."""
    folder.mkdir()
    with start(folder, tables, 0) as life:
        assert not live(life, random.Random(0), lambda _: False)
    return end(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_texts(tmp_path)
    return tmp_path


def lives(folder: Path, draw: random.Random, layouts: list[str], num_kills: int, tables: Tables) -> Iterator[str]:
    """Lets the run live, in each life in one of `layouts`, until it has ended by itself; yields how each life ended.

    After `num_kills` kills nobody disturbs it any more.
    """
    number = killed = 0
    ended = False
    while not ended:
        layout = draw.choice(layouts)
        mode = draw.choice(["async", "sync"])
        is_time: Any = kill_anywhere(folder, draw, LONGEST_S, STEPS - 3)
        if draw.random() < 0.5:
            is_time = kill_in_a_save(folder, draw)
        if killed == num_kills:
            is_time = lambda _: False  # noqa: E731 - one of three rules
        with start(folder, layout_of(layout, tables, checkpoint__mode=mode), number) as life:
            was_killed = live(life, draw, is_time)
        number += 1
        killed += was_killed
        ended = not was_killed
        yield f"life {number} on {layout}, {mode}: {'killed' if was_killed else 'ended'}"


def assert_same(wanted: End, found: End, *, bits: bool, layouts: int) -> None:
    """Rows of all steps once and in order; weights and optimizer states of the last checkpoint."""
    assert [row["step"] for row in found.rows] == [row["step"] for row in wanted.rows]
    # what a rank keeps for itself, such as the order of its buckets, another layout has not
    shared, also = (
        {name: tensor for name, tensor in one.tensors.items() if layouts == 1 or not name.startswith(OF_A_RANK)}
        for one in (wanted, found)
    )
    assert shared.keys() == also.keys()
    if bits:
        assert found.rows == wanted.rows
        assert all(torch.equal(shared[name], also[name]) for name in shared)
        return
    for one, other in zip(wanted.rows, found.rows, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-10)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-10)
    for name, tensor in shared.items():
        error = torch.linalg.vector_norm(also[name] - tensor) / torch.linalg.vector_norm(tensor)
        assert error < 1e-10 or torch.equal(also[name], tensor), (name, float(error))


def killed(folder: Path, seed: int, layouts: list[str], num_kills: int, tables: Tables = PLAN) -> list[str]:
    """Kills a run `num_kills` times, or less if it ends before, and compares; returns how its lives ended.

    Bit for bit where it has one layout, or sums are canonical.
    """
    print(f"seed {seed}")
    draw = random.Random(seed)
    files = [str(folder / name) for name in tables["data"]["files"]]
    plan = layout_of(layouts[0] if len(layouts) == 1 else "alone", tables, data__files=files)
    wanted = undisturbed(folder / "undisturbed", plan)
    told = []
    for line in lives(folder, draw, layouts, num_kills, tables):
        print(line)
        told.append(line)
    is_canonical = "reduction" in tables.get("parallel", {})
    assert_same(wanted, end(folder), bits=len(layouts) == 1 or is_canonical, layouts=len(layouts))
    return told


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layouts", [["dp2 sharded"], ["dp2 bucketed", "wp2"]], ids=" or ".join)
def test_a_killed_run_ends_with_the_numbers_of_an_undisturbed_one(folder: Path, layouts: list[str]) -> None:
    assert any("killed" in line for line in killed(folder, 3, layouts, 1))


CANONICAL = changed(PLAN, parallel={"reduction": "canonical"})
CAMPAIGN = [
    *((100 + index, [layout], PLAN) for index, layout in enumerate(NAMES)),
    *((seed, NAMES, PLAN) for seed in range(200, 208)),
    *((seed, [layout for layout in NAMES if "sp" not in layout], CANONICAL) for seed in range(300, 304)),
]


@pytest.mark.campaign
@pytest.mark.timeout(1100)
@pytest.mark.parametrize(("seed", "layouts", "tables"), CAMPAIGN, ids=[str(seed) for seed, *_ in CAMPAIGN])
def test_six_kills(folder: Path, seed: int, layouts: list[str], tables: Tables) -> None:
    """A layout is drawn for each life."""
    killed(folder, seed, layouts, 6, tables)

"""A run that is killed over and over: each life goes on from the newest checkpoint, in the same layout or in another."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from sley_checkpoint.reader import newest, read
from sley_core.attempt import read_attempt
from sley_testing.forked import ForkedProgram
from sley_testing.plans import Tables

NAME = "killed"
LIFE_S = 60.0
"""How long a life may take on a machine that is busy with other tests."""


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

    def kill(self, ranks: Any) -> None:
        for rank in ranks:
            if self.programs[rank].poll() is None:
                os.kill(self.programs[rank].pid, signal.SIGKILL)


def start(folder: Path, tables: Tables, world: int, number: int) -> Ranks:
    """Starts life `number` of the run on `world` ranks."""
    plan = folder / f"plan-{number}.toml"
    plan.write_text(tomli_w.dumps(tables), "utf-8")
    shared = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "PYTEST"))},
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "SLEY_STORE": (folder / f"store-{number}").as_uri(),
    }
    life = Ranks()
    attempt = read_attempt(folder / "runs" / NAME)
    # What has saved nothing is begun anew by whoever starts it, and not by `auto`.
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
        assert lived_s < LIFE_S, "a life without end"
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
    """What a finished run has. rows: without what is measured. tensors: of its newest checkpoint, with optimizer states."""

    rows: list[dict[str, Any]]
    tensors: dict[str, Any]


def end(folder: Path) -> End:
    """Returns what the run in `folder` came to."""
    run = folder / "runs" / NAME
    lines = (run / "metrics.jsonl").read_text("utf-8").splitlines()
    keys = ("step", "loss", "grad_norm", "lr")
    found = newest(run / "checkpoints")
    assert found.path is not None, list(run.iterdir())
    assert not found.passed_over, found.passed_over
    saved = read(found.path)
    return End([{key: json.loads(line)[key] for key in keys} for line in lines], {name: saved[name] for name in saved})


def undisturbed(folder: Path, tables: Tables, world: int) -> End:
    """Lets a run of its own live to its end."""
    folder.mkdir()
    with start(folder, tables, world, 0) as life:
        assert not live(life, random.Random(0), lambda _: False)
    return end(folder)

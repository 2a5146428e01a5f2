"""Drawn attempts of runs: begun, killed, begun anew, requeued, moved, made longer, gone back, on another host, with folders of
checkpoints that are shared or away. Whatever they do, rows are of the steps that led to the weights beside them.

What is true does not come from ids: each start has a learning rate of its own, and notes the weights before and after each of
its steps. So the weights that a folder has lead back, step by step, to the rows that it must have.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import pytest

from sley_checkpoint.folders import open_folder
from sley_checkpoint.reader import complete_checkpoints, index_or_none, read
from sley_core.attempt import read_attempt
from sley_core.errors import SleyError
from sley_core.metrics.jsonl import JsonlWriter, rows
from sley_core.run import Run
from sley_core.weight_files.read import WeightFiles
from sley_testing.ranks import RankError, Ranks
from train_cli.main import main
from train_cli.saved import load_run_plan, newest_weights

pytestmark = pytest.mark.timeout(1200)

HOSTS = ("here", "there")
SHARED = "ck"
KILLED = 9
KILLS = {
    "row": ("sley_core.metrics.jsonl.JsonlWriter.write", False),
    "publish": ("sley_checkpoint.folders.LocalFolder.publish", True),
    "published": ("sley_checkpoint.folders.LocalFolder.publish", False),
    "attempt": ("sley_core.attempt.write_attempt", True),
    "attempted": ("sley_core.attempt.write_attempt", False),
    "rewound": ("sley_core.metrics.jsonl.JsonlWriter.rewind", False),
    "remove": ("sley_checkpoint.folders.LocalFolder.remove", True),
    "summary": ("train_cli.rank.write_json", False),
}
"""Where a process ends: a function, and whether before it does its work."""


class Start(NamedTuple):
    """One start of a run. number: of the draw, and its learning rate. options, changes: of the command. environ: variables.
    kill: where the process ends, and after how many times; None: nowhere.
    """

    number: int
    options: tuple[str, ...]
    changes: tuple[str, ...]
    environ: dict[str, str]
    kill: tuple[str, int] | None


def begin(start: Start, plan: str, log: str) -> tuple[int, str]:
    """Runs the command in this process, and returns exit code and output; notes each step in the file `log`."""
    said = io.StringIO()
    changes = [part for change in (*start.changes, f"optimizer.lr={rate(start.number)}") for part in ("--set", change)]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        for name, value in start.environ.items():
            patch.setenv(name, value)
        note(patch, log)
        if start.kill is not None:
            lay(patch, *start.kill)
        code = main(["run", plan, *start.options, *changes])
    return code, said.getvalue()


def rate(number: int) -> float:
    return 1e-3 * (1 + number / 64)


def note(patch: pytest.MonkeyPatch, log: str) -> None:
    """Lets a run note the rate, the number, and digests of the weights before and after each step, before it writes a row."""
    train, write = Run.train, JsonlWriter.write
    state: dict[str, Any] = {}

    def now(run: Run) -> str:
        return digest({param.name: param.parameter for param in run.registry})

    def trained(run: Run) -> Any:
        state.update(run=run, before=now(run))
        return train(run)

    def written(writer: JsonlWriter, row: Any) -> None:
        after = now(state["run"])
        with Path(log).open("a", encoding="utf-8") as file:
            file.write(json.dumps([row["lr"], row["step"], state["before"], after]) + "\n")
        state["before"] = after
        write(writer, row)

    patch.setattr(Run, "train", trained)
    patch.setattr(JsonlWriter, "write", written)


def digest(weights: Any) -> str:
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(weights[name].detach().numpy().tobytes())
    return found.hexdigest()[:16]


def lay(patch: pytest.MonkeyPatch, where: str, times: int) -> None:
    """Lets this process end when it gets to `where` for that time."""
    place, is_before = KILLS[where]
    original, left = resolve_name(place), [times]

    def call(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if is_before and not left[0]:
            os._exit(KILLED)
        result = original(*args, **kwargs)
        if not left[0]:
            os._exit(KILLED)
        return result

    patch.setattr(place, call)


class World:
    """The folders of some runs, what is done to them, and what is true of their weights."""

    def __init__(self, folder: Path, plan: Path, ranks: Callable[..., Ranks], seed: int) -> None:
        self.folder, self.plan, self.ranks = folder, plan, ranks
        self.draw = random.Random(seed)
        self.log = folder / "truth.jsonl"
        self.log.touch()
        self.number = 0
        self.steps = dict.fromkeys(HOSTS, 4)
        self.told: list[str] = []

    def act(self) -> None:
        """Does something that is drawn, and checks all folders."""
        label = self.draw.choice(["run"] * 8 + ["move", "away", "damage"])
        self.told.append(getattr(self, f"_{label}")())
        for host in HOSTS:
            self._check(self.folder / host / "small")

    def _run(self) -> str:
        """Starts a run in one of the ways in which users and schedulers do, and perhaps kills it."""
        self.number += 1
        host, shared = self.draw.choice(HOSTS), self.draw.random() < 0.6
        self.steps[host] = min(40, self.steps[host] + self.draw.choice((0, 0, 2, 4)))
        environ = {}
        options: list[str] = []
        kind = self.draw.choice(["plain", "overwrite", "auto", "auto", "requeued", "requeued", "again", "back"])
        if kind in ("requeued", "again"):
            environ = {"SLURM_RESTART_COUNT": "1", "SLURM_JOB_ID": self.draw.choice(["1", "2"])}
        options += ["--overwrite"] if kind in ("overwrite", "again") else []
        options += ["--resume", "auto"] if kind == "auto" else []
        if kind == "back":
            found = sorted(self.folder.glob("**/step-*"))
            options += ["--resume", str(self.draw.choice(found))] if found else ["--resume", "auto"]
        every, keep, mode = (self.draw.choice(few) for few in ((1, 2, 3), (1, 2), ("sync", "async")))
        where = f", folder = '{self.folder / SHARED}'" if shared else ""
        table = f"checkpoint={{ every_steps = {every}, keep = {keep}, mode = '{mode}'{where} }}"
        changes = [f"run.folder='{host}'", f"run.steps={self.steps[host]}"]
        changes += [table] if self.draw.random() < 0.9 else []
        # One rank where rank 0 may be refused before the others have come, whom a launcher would end.
        size = self.draw.choice((1, 2)) if kind in ("overwrite", "auto", "again") else 1
        kill = (self.draw.choice([*KILLS]), self.draw.randrange(1, 6)) if self.draw.random() < 0.5 else None
        start = Start(self.number, tuple(options), (*changes, f"parallel.dp={size}"), environ, kill)
        run = self.folder / host / "small"
        before, had = self._checkpoints(), _rows(run)
        try:
            (code, said), *_ = self.ranks(size, 60, init=False)(begin, start, str(self.plan), str(self.log))
        except RankError:
            assert kill is not None, start
            code, said = KILLED, ""
        assert code in (0, KILLED) or "error[" in said, said
        assert "Traceback" not in said, said
        self._check_what_is_gone(before, run, is_anew="--overwrite" in options)
        if "--overwrite" not in options and had and (now := _rows(run)):
            assert kind == "back" or now[0] == had[0], f"work was begun anew: {start}\n{said}"
        return f"{start}: {code} {said.strip().splitlines()[-1:]}"

    def _move(self) -> str:
        """Gives each host's run to the other one."""
        one, other = (self.folder / host for host in HOSTS)
        for source, target in ((one, self.folder / "aside"), (other, one), (self.folder / "aside", other)):
            if source.exists():
                source.rename(target)
        return "moved"

    def _away(self) -> str:
        """Takes the shared checkpoints away, or brings them back."""
        here, away = self.folder / SHARED, self.folder / "away"
        if away.exists():
            shutil.rmtree(here, ignore_errors=True)
            away.rename(here)
        elif here.exists():
            here.rename(away)
        return "away, or back"

    def _damage(self) -> str:
        """Cuts a file of a checkpoint short."""
        found = sorted(self.folder.glob("**/step-*/*.safetensors"))
        if found:
            file = self.draw.choice(found)
            os.truncate(file, file.stat().st_size // 2)
        return "damaged"

    def _checkpoints(self) -> dict[Path, str]:
        """Returns which attempt wrote each checkpoint that can be read."""
        indexes = {path: index_or_none(open_folder(path)) for path in self.folder.glob("**/step-*")}
        return {path: index.lineage[-1].id for path, index in indexes.items() if index is not None}

    def _check_what_is_gone(self, before: dict[Path, str], run: Path, *, is_anew: bool) -> None:
        attempt = read_attempt(run)
        own = attempt.ids if attempt is not None else frozenset()
        for path, writer in before.items():
            if not path.exists():
                assert writer in own or (is_anew and path.is_relative_to(run)), f"{path} of {writer}, not of {own}"

    def _check(self, run: Path) -> None:
        """Asserts that the rows in the folder of a run are steps that led to each other, and to its newest weights."""
        truth = {
            (rate, step): (before, after)
            for rate, step, before, after in map(json.loads, self.log.read_text("utf-8").splitlines())
        }
        came = {(after, step): before for (_, step), (before, after) in truth.items()}
        have = _rows(run)
        for row, following in pairwise(have):
            assert row[1] < following[1], self.told
            assert row[1] + 1 < following[1] or truth[following][0] == truth[row][1], (row, following, self.told)
        if not have:
            return
        for weights, step in _weights(run):
            steps = {number: key for key in have for number in (key[1],)}
            if step + 1 in steps:
                assert truth[steps[step + 1]][0] == weights, f"weights of {step} did not lead on: {self.told}"
            for number in range(step, 0, -1):
                if number in steps:
                    assert truth[steps[number]][1] == weights, f"row {number} and weights of {step}: {self.told}"
                weights = came[weights, number]


def _rows(run: Path) -> list[tuple[float, int]]:
    return [(float(row["lr"]), int(row["step"])) for row in rows(run)]


def _weights(run: Path) -> Iterator[tuple[str, int]]:
    """Yields digest and step of the newest weights of a run, and of each checkpoint from which it would resume."""
    attempt = read_attempt(run)
    with contextlib.suppress(SleyError):
        plan = load_run_plan(run)
        path, step = newest_weights(run, plan)
        found = WeightFiles(path) if isinstance(path, Path) else None
        assert step is not None
        yield digest({name: found.tensor(name) for name in found.names} if found else dict(read(path).weights())), step
    for own in (run / "checkpoints", run.parent.parent / SHARED):
        for name in complete_checkpoints(open_folder(own)):
            index = index_or_none(open_folder(own / name))
            if index is not None and attempt is not None and attempt.has_taken(index.lineage, index.step):
                with contextlib.suppress(SleyError):  # a damaged one is passed over
                    yield digest(dict(read(own / name).weights())), index.step


@pytest.mark.parametrize(
    ("seed", "num"), [(1, 5), *(pytest.param(seed, 20, marks=pytest.mark.campaign) for seed in range(2, 12))]
)
def test_rows_are_of_the_steps_that_led_to_the_weights(
    plan: Path, folder: Path, ranks: Callable[..., Ranks], seed: int, num: int
) -> None:
    world = World(folder, plan, ranks, seed)
    for _ in range(num):
        world.act()
    assert world.log.stat().st_size, "no step was taken"

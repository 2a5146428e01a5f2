"""A small plan with its data, the command line in this process and in others, and plugins that are installed for a test."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import IO

import pytest

from sley_core.testing.forked import ForkedProgram
from sley_core.testing.processes import MARK, Process, assert_none_left, descendants, processes_with
from sley_core.testing.ranks import Ranks
from train_cli.main import main

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, programs that tests start would ignore it, as they should

LIMIT_S = 60.0
"""How long a program may take on a machine that is busy with other tests."""

MODEL = """\
[model]
use = "core.llama"
num_layers = 1
hidden = 16
heads = 2
"""

OWN_MODEL = """\
[model]
factory = "own:layers"
"""

DATA = """\
[data]
use = "core.text"
files = ["corpus.txt"]
sequence = 16
"""

PLAN = f"""\
plan = 1

[run]
name = "small"
steps = 4
device = "cpu"
log_every = 2

{MODEL}
{DATA}
[batch]
global_size = 4
micro_size = 1

[optimizer]
use = "core.adamw"
lr = 1e-3

[parallel]
dp = 2
"""


@dataclass(frozen=True)
class Result:
    """How a command ended and what it wrote."""

    code: int
    out: str
    err: str


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder with a corpus in it; no launcher and no colours."""
    (tmp_path / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60, "utf-8")
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NO_COLOR", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def plan(folder: Path) -> Path:
    """A plan of two ranks that takes a moment."""
    path = folder / "plan.toml"
    path.write_text(PLAN, "utf-8")
    return path


@pytest.fixture
def own_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """`own_model(source)` writes own.py and a plan whose model is `own:layers`; data: the text of its table `[data]`."""

    def write(source: str, data: str = DATA) -> Path:
        (folder / "own.py").write_text(dedent(source), "utf-8")
        path = folder / "plan.toml"
        path.write_text(PLAN.replace(MODEL, OWN_MODEL).replace(DATA, data), "utf-8")
        return path

    monkeypatch.setattr(sys, "path", list(sys.path))
    yield write
    sys.modules.pop("own", None)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """`cli("check", path)` runs a command in this process; changes: what follows a `--set` each."""

    def run(*arguments: object, changes: Iterable[str] = ()) -> Result:
        capsys.readouterr()
        code = main([str(argument) for argument in (*arguments, *sets(changes))])
        written = capsys.readouterr()
        return Result(code, written.out, written.err)

    return run


def sets(changes: Iterable[str]) -> list[str]:
    """`--set` before each of `changes`."""
    return [part for change in changes for part in ("--set", change)]


@pytest.fixture
def together(ranks: Callable[..., Ranks], capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """`together(2, "run", path)` runs a command on two ranks as torchrun would, but forked.

    The result has the largest exit code, and as `err` whatever the ranks wrote.
    """

    def run(size: int, *arguments: object) -> Result:
        capsys.readouterr()
        codes = ranks(size, 120, init=False)(main, [str(argument) for argument in arguments])
        lines = (line.partition("] ")[2] for line in capsys.readouterr().out.splitlines())
        return Result(max(codes), "", "\n".join(lines))

    return run


class Program:
    """A program that runs beside the test. Its lines are read as they come; none of its processes outlives the test."""

    process: subprocess.Popen[str] | ForkedProgram

    def __init__(self, command: list[str], folder: Path, environ: dict[str, str], *, fresh: bool) -> None:
        """Starts `command`: unless `fresh`, `python -m module ...` is forked from a process that has imported torch."""
        self._mark = uuid.uuid4().hex
        env = {**os.environ, "OMP_NUM_THREADS": "1", **environ, MARK: self._mark}
        if command[:2] == [sys.executable, "-m"] and not fresh:
            self.process = ForkedProgram(command[2], command[3:], cwd=folder, env=env)
        else:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        self._arrived = threading.Condition()
        self._lines: dict[str, list[str]] = {"out": [], "err": []}
        self._readers = [self._read("out", self.process.stdout), self._read("err", self.process.stderr)]

    @property
    def out(self) -> str:
        return "".join(self._lines["out"])

    @property
    def err(self) -> str:
        return "".join(self._lines["err"])

    def wait_for(self, text: str) -> None:
        """Returns when `text` stands on stderr; fails if the program ends first or the limit passes."""
        with self._arrived:
            found = self._arrived.wait_for(lambda: text in self.err or self.process.poll() is not None, LIMIT_S)
        assert found, f"no {text!r} within {LIMIT_S} s\n{self.err}"
        assert text in self.err, f"ended with {self.process.returncode} before {text!r}\n{self.out}\n{self.err}"

    def finish(self, limit_s: float = LIMIT_S) -> Result:
        """Waits for its end; fails after `limit_s`, or if a process is left."""
        code = self.process.wait(limit_s)
        for reader in self._readers:
            reader.join(limit_s)
        assert_none_left(lambda: processes_with(MARK, self._mark), within_s=5)
        return Result(code, self.out, self.err)

    def ranks(self) -> list[Process]:
        """The ranks that it started, in order of rank."""
        return sorted(descendants(self.process.pid), key=lambda process: process.pid)

    def close(self) -> None:
        left = [process.pid for process in processes_with(MARK, self._mark)]
        for pid in left if self.process.poll() is not None else (self.process.pid, *left):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()

    def _read(self, name: str, stream: IO[str] | None) -> threading.Thread:
        assert stream is not None

        def read() -> None:
            for line in stream:
                with self._arrived:
                    self._lines[name].append(line)
                    self._arrived.notify_all()
            # The stream ends a moment before the process does.
            for _ in range(100):
                if self.process.poll() is not None:
                    break
                time.sleep(0.05)
            with self._arrived:
                self._arrived.notify_all()

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Program]]:
    """`start("run", path)` starts `python -m train_cli run path` in the folder, forked, as are the ranks that it starts.

    launcher: what goes before `-m train_cli`. fresh: as a user's shell starts it, each process with an interpreter of its own.
    changes: what follows a `--set` each; other names are variables of its environment.
    """
    programs: list[Program] = []

    def begin(
        *arguments: object,
        launcher: tuple[str, ...] = (sys.executable,),
        fresh: bool = False,
        changes: Iterable[str] = (),
        **environ: str,
    ) -> Program:
        command = [*launcher, "-m", "train_cli", *(str(argument) for argument in (*arguments, *sets(changes)))]
        programs.append(Program(command, folder, environ, fresh=fresh))
        return programs[-1]

    yield begin
    for program in programs:
        program.close()


@pytest.fixture
def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`install("sley-odd", plugin="odd", source="...")` puts a distribution with a plugin on sys.path.

    group: of the entry point. module: what it names; another distribution's, if there is no source.
    """
    site = folder / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])))
    made: list[str] = []

    def add(
        dist: str,
        plugin: str,
        source: str = "",
        *,
        requires: str = "sley-core",
        group: str = "sley.plugins",
        attribute: str = "",
    ) -> None:
        module = f"{dist.replace('-', '_')}_module"
        made.append(module)
        (site / f"{module}.py").write_text(dedent(source), "utf-8")
        info = site / f"{dist.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\nRequires-Dist: {requires}\n", "utf-8"
        )
        (info / "entry_points.txt").write_text(f"[{group}]\n{plugin} = {module}{attribute}\n", "utf-8")
        importlib.invalidate_caches()

    yield add
    for module in made:
        sys.modules.pop(module, None)

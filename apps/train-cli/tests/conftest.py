"""Fixtures: a small plan with its data, the command line in this process and in others, and installed plugins."""

import importlib
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from train_cli.main import main

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "own"))

from started_program import TORCHRUN, Program, Result

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, programs of tests would ignore it

MODEL = """\
[model]
use = "models.llama"
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
use = "data.text"
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


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new current folder with a corpus; no launcher and no colors."""
    (tmp_path / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60, "utf-8")
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NO_COLOR", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def plan(folder: Path) -> Path:
    """A short plan of two ranks."""
    path = folder / "plan.toml"
    path.write_text(PLAN, "utf-8")
    return path


@pytest.fixture
def own_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """`own_model(source)` writes `own.py` and a plan with the model `own:layers`. data: the text of the `[data]` table."""

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
    """`cli("check", path)` runs a command in this process. changes: the values of `--set` options."""

    def run(*arguments: object, changes: Iterable[str] = ()) -> Result:
        capsys.readouterr()
        code = main([str(argument) for argument in (*arguments, *sets(changes))])
        output = capsys.readouterr()
        return Result(code, output.out, output.err)

    return run


def sets(changes: Iterable[str]) -> list[str]:
    """Returns `--set` options with these values."""
    return [part for change in changes for part in ("--set", change)]


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Program]]:
    """`start("run", path)` starts `python -m train_cli run path` in the folder, forked.

    torchrun: the options of torchrun, which starts two ranks. changes: the values of `--set` options. environ: environment
    variables.
    """
    programs: list[Program] = []

    def start_program(
        *arguments: object, torchrun: tuple[str, ...] | None = None, changes: Iterable[str] = (), **environ: str
    ) -> Program:
        launcher = (sys.executable,) if torchrun is None else (*TORCHRUN, *torchrun)
        command = [*launcher, "-m", "train_cli", *(str(argument) for argument in (*arguments, *sets(changes)))]
        programs.append(Program(command, folder, environ))
        return programs[-1]

    yield start_program
    for program in programs:
        program.close()


@pytest.fixture
def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """`install("sley-odd", "odd", "source")` puts a distribution with a plugin on sys.path.

    group: the group of the entry point. attribute: the attribute of the module in the entry point, such as `:sweep`.
    """
    site = folder / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    modules: list[str] = []

    def add(dist: str, plugin: str, source: str, *, group: str = "sley.plugins", attribute: str = "") -> None:
        name = dist.replace("-", "_")
        modules.append(f"{name}_module")
        (site / f"{name}_module.py").write_text(dedent(source), "utf-8")
        info = site / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\nRequires-Dist: sley-core\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{plugin} = {name}_module{attribute}\n", "utf-8")
        importlib.invalidate_caches()

    yield add
    for module in modules:
        sys.modules.pop(module, None)

"""The entry: exit codes, help, what is imported, errors that nobody expected, commands of other packages."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sley_core.errors import RunError
from train_cli.main import COMMANDS, foreign, main

Cli = Callable[..., Any]


@pytest.fixture(autouse=True)
def _fresh_commands() -> Iterator[None]:
    foreign.cache_clear()
    yield
    foreign.cache_clear()


def test_help_begins_with_two_examples_and_ends_with_the_exit_codes(cli: Cli) -> None:
    result = cli("--help")
    assert result.code == 0
    lines = [line.strip() for line in result.out.splitlines() if line.strip()]
    assert lines[1] == "Examples:"
    assert all(line.startswith("train-cli ") for line in lines[2:4])
    assert "Results go to runs/NAME where the command is given; NAME is the plan's run.name." in " ".join(lines)
    codes = lines[lines.index("Exit codes:") + 1 :]
    assert [line.split()[0] for line in codes] == ["0", "1", "2", "3", "4", "129", "130", "131", "138", "140", "143", "152"]


def test_every_command_has_help_and_the_common_options(cli: Cli) -> None:
    for name in ("run", "check", "show", "plugins", "needs", "schema", "env"):
        assert f"\n  {name} " in cli("--help").out
        result = cli(name, "--help")
        assert result.code == 0
        assert "--message-format" in result.out
        assert "--traceback" in result.out


def test_commands_are_listed_in_the_order_of_their_use(cli: Cli, install: Callable[..., None]) -> None:
    install("sley-sweep", "sweep", "def sweep(): ...", group="sley.commands", attribute=":sweep")
    lines = cli("--help").out.splitlines()
    lines = lines[lines.index("Prepare:") : next(at for at, line in enumerate(lines) if "Exit codes:" in line)]
    assert [line for line in lines if line and line[0] != " "] == [
        "Prepare:",
        "Look ahead:",
        "Train:",
        "Look back:",
        "Of other packages:",
    ]
    names = [line.split()[0] for line in lines if line.startswith("  ")]
    order = ["new", "check", "show", "estimate", "search", "calibrate", "run", "doctor", "report", "sweep"]
    assert [name for name in names if name in order] == order
    assert sorted(names) == sorted([*COMMANDS, "sweep"])


def test_check_says_that_it_runs_code_with_the_model(cli: Cli) -> None:
    said = " ".join(cli("check", "--help").out.replace("│", " ").split())
    assert "imports torch and whatever code the plan names, and runs it" in said


@pytest.mark.parametrize(
    "arguments", [[], ["nonsense"], ["check"], ["check", "--nonsense", "x"], ["run", "p.toml", "--nproc", "0"]]
)
def test_a_wrong_command_line_is_exit_2(cli: Cli, arguments: list[str]) -> None:
    result = cli(*arguments)
    assert result.code == 2
    assert "Usage: train-cli" in result.err + result.out
    assert "Traceback" not in result.err


def test_a_typo_gets_a_suggestion(cli: Cli) -> None:
    assert "'check'" in cli("chek").err


def test_version_lists_the_packages(cli: Cli) -> None:
    result = cli("--version")
    assert result.code == 0
    names = [line.split()[0] for line in result.out.splitlines()]
    assert {"sley-core", "sley-train-cli"} <= set(names)
    assert names == sorted(names)


def test_m_works() -> None:
    command = [sys.executable, "-m", "train_cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "sley-core" in done.stdout


# -- what nobody expected ----------------------------------------------------------------------------------------------


def test_an_internal_error_is_exit_1_with_a_way_to_report_it(cli: Cli, plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise AssertionError("a world of 3, 2 were given")

    monkeypatch.setattr("sley_core.topology.Topology.coordinates", broken)
    result = cli("show", plan)
    assert result.code == 1
    assert "AssertionError: a world of 3, 2 were given" in result.err
    assert "Traceback" not in result.err
    assert "Traceback" in cli("show", plan, "--traceback").err
    assert "Traceback" in cli("--traceback", "show", plan).err


def test_interrupts_have_their_codes(monkeypatch: pytest.MonkeyPatch, plan: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sley_core.plan.load.read_file", interrupt)
    assert main(["check", str(plan)]) == 130


def test_an_error_carries_its_own_code(monkeypatch: pytest.MonkeyPatch, plan: Path, cli: Cli) -> None:
    def fail(*_: object) -> None:
        raise RunError("no-luck", "it went wrong", hint="try again")

    monkeypatch.setattr("sley_core.plan.load.read_file", fail)
    result = cli("check", plan, "--message-format", "json")
    assert result.code == 1
    assert json.loads(result.err)["code"] == "no-luck"


# -- what is imported, and how long it takes ---------------------------------------------------------------------------

LIGHT = [["--help"], ["check", "plan.toml"], ["plugins"], ["show", "plan.toml"], ["needs", "plan.toml"], ["doctor", "."]]


def test_torch_stays_away(plan: Path) -> None:
    """One interpreter runs all of them: the first that imports something heavy is named."""
    program = f"""
import sys
from train_cli.main import main
for arguments in {LIGHT!r}:
    code = main(arguments)
    heavy = [name for name in ("torch", "numpy", "rich") if name in sys.modules]
    if code or heavy:
        sys.exit(f"{{arguments}}: {{code}}, imported {{heavy}}")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=plan.parent, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.sample(1)
@pytest.mark.parametrize("arguments", LIGHT[:3], ids=lambda arguments: arguments[0])
def test_answers_in_less_than_three_times_its_libraries(plan: Path, arguments: list[str]) -> None:
    """Seconds of processor time, the least of interleaved runs: whatever else the machine does only adds to it."""
    base, ours = [sys.executable, "-c", "import typer, pydantic"], [sys.executable, "-m", "train_cli", *arguments]
    least_base = least_ours = float("inf")
    for attempt in range(25):
        least_base = min(least_base, processor_s(base, plan.parent))
        least_ours = min(least_ours, processor_s(ours, plan.parent))
        if attempt >= 4 and least_ours < 3 * least_base:
            return
    pytest.fail(f"{least_ours:.3f} s against {least_base:.3f} s")


def processor_s(command: list[str], folder: Path) -> float:
    """Of a program whose modules are compiled, as after an installation; the first call compiles what is not."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=folder, env=environ, capture_output=True, timeout=60, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


# -- commands of other packages ----------------------------------------------------------------------------------------

SWEEP = """
    def sweep(number: int = 3) -> None:
        "Sweeps."
        print("swept", number)
"""


def test_a_foreign_command_is_listed_unimported_and_called(cli: Cli, install: Callable[..., None]) -> None:
    install("sley-sweep", "sweep", SWEEP, group="sley.commands", attribute=":sweep")
    assert "A command of sley-sweep 1.0." in cli("--help").out
    assert "sley_sweep_module" not in sys.modules
    result = cli("sweep", "--number", "5")
    assert (result.code, result.out) == (0, "swept 5\n")
    assert "Sweeps." in cli("sweep", "--help").out


def test_a_broken_foreign_command_breaks_no_other(cli: Cli, install: Callable[..., None]) -> None:
    install("sley-sweep", "sweep", "import nothing_of_this_name", group="sley.commands", attribute=":sweep")
    assert cli("--help").code == 0
    result = cli("sweep")
    assert result.code == 4
    assert "error[command-import]" in result.err
    assert "sley-sweep 1.0" in result.err


def test_two_packages_of_one_command(cli: Cli, install: Callable[..., None]) -> None:
    for dist in ("sley-sweep", "sley-mop"):
        install(dist, "sweep", SWEEP, group="sley.commands", attribute=":sweep")
    result = cli("sweep")
    assert result.code == 4
    assert "sley-mop 1.0 and sley-sweep 1.0" in result.err or "sley-sweep 1.0 and sley-mop 1.0" in result.err


def test_ours_come_first(cli: Cli, install: Callable[..., None], plan: Path) -> None:
    install("sley-sweep", "check", SWEEP, group="sley.commands", attribute=":sweep")
    assert cli("check", plan).err.startswith("1 plan is fine; ")

"""The command line: exit codes, help, errors, commands of other packages, `plugins` and `env`."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tomli
from chat_folder import write_chats
from started_program import Cli, Start

from sley_core.errors import RunError
from train_cli.main import COMMAND_SUMMARIES, find_foreign_commands

Install = Callable[..., None]
CLONE = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _fresh_commands() -> Iterator[None]:
    find_foreign_commands.cache_clear()
    yield
    find_foreign_commands.cache_clear()


def test_help_lists_every_command_and_exit_code(cli: Cli, install: Install) -> None:
    install("sley-sweep", "sweep", "def sweep(): ...", group="sley.commands", attribute=":sweep")
    lines = [line.strip() for line in cli("--help").out.splitlines() if line.strip()]
    codes = lines[lines.index("Exit codes:") + 1 :]
    assert [line.split()[0] for line in codes] == ["0", "1", "2", "3", "4", "129", "130", "138", "140", "143", "152"]
    sections = ["Prepare:", "Estimate:", "Train:", "Inspect and use runs:", "From other packages:"]
    assert [line for line in lines if line in sections] == sections
    names = [line.split()[0] for line in lines[lines.index("Prepare:") : lines.index("Exit codes:")] if line not in sections]
    assert sorted(names) == sorted([*COMMAND_SUMMARIES, "sweep"])


@pytest.mark.parametrize("name", COMMAND_SUMMARIES)
def test_every_command_has_help(cli: Cli, name: str) -> None:
    result = cli(name, "--help").expect(0)
    assert "Options:" in result.out


@pytest.mark.parametrize(
    "arguments", [[], ["nonsense"], ["check"], ["check", "--nonsense", "x"], ["run", "p.toml", "--nproc", "0"], ["chek"]]
)
def test_a_wrong_command_line_is_exit_2(cli: Cli, arguments: list[str]) -> None:
    result = cli(*arguments).expect(2)
    assert "Usage: train-cli" in result.err + result.out
    assert "Traceback" not in result.err


def test_the_module_is_a_program(start: Start) -> None:
    result = start("--version").finish().expect(0)
    assert {"sley-core", "sley-train-cli"} <= {line.split()[0] for line in result.out.splitlines()}


# -- errors ------------------------------------------------------------------------------------------------------------


def test_an_internal_error_is_exit_1_without_a_traceback(cli: Cli, plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise AssertionError("a world of 3, 2 were given")

    monkeypatch.setattr("sley_core.topology.Topology.coordinates", fail)
    result = cli("show", plan).expect(1, "AssertionError: a world of 3, 2 were given")
    assert "Traceback" not in result.err
    assert "Traceback" in cli("show", plan, "--traceback").err
    assert "Traceback" in cli("--traceback", "show", plan).err


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (RunError("no-luck", "it went wrong"), 1)])
def test_an_error_has_its_code(cli: Cli, plan: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("sley_core.plan.load.read_file", fail)
    result = cli("check", plan).expect(code)
    assert code == 130 or result.err == "error[no-luck]: it went wrong\n"


LIGHT = [["--help"], ["check", "plan.toml"], ["plugins"], ["show", "plan.toml"], ["doctor", "."]]
DATA = (
    'use="data.chat", files=["chats.jsonl"], tokenizer="tokenizer"',
    'use="data.text", files=["chats.jsonl"], tokenizer="tokenizer", separator="\\n"',
    'use="data.tokens", files=["tokens.bin"], vocab_size=65536',
)


def test_light_commands_do_not_import_torch(plan: Path) -> None:
    """The sizes of a model folder are read without torch, too. Datasets do not need it."""
    (plan.parent / "base").mkdir()
    config = {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    config |= {"intermediate_size": 48, "vocab_size": 256}
    (plan.parent / "base" / "config.json").write_text(json.dumps(config), "utf-8")
    commands = [*LIGHT, ["show", "plan.toml", "--set", "model={use='models.llama', weights='base'}"]]
    chats = plan.parent / "chats"
    chats.mkdir()
    write_chats(chats)
    (chats / "tokens.bin").write_bytes(b"tokens" * 100)
    data_commands = [["data", "show", "chats/plan.toml", "--set", f"data={{{data}, sequence=160}}"] for data in DATA]
    program = f"""
import sys
from train_cli.main import main
for arguments in {commands!r}:
    code = main(arguments)
    heavy = [name for name in ("torch", "rich") if name in sys.modules]
    if code or heavy:
        sys.exit(f"{{arguments}}: {{code}}, imported {{heavy}}")
sys.modules["torch"] = None  # libraries for data may import it if it is there
sys.exit(any([main(arguments) for arguments in {data_commands!r}]))
"""
    command = [sys.executable, "-c", program]
    process = subprocess.run(command, cwd=plan.parent, capture_output=True, text=True, timeout=60, check=False)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("trained") >= len(DATA)


# -- commands of other packages ----------------------------------------------------------------------------------------

SWEEP = """
    def sweep(number: int = 3) -> None:
        "Sweeps."
        print("swept", number)
"""


def test_a_command_of_another_package_is_imported_when_called(cli: Cli, install: Install, plan: Path) -> None:
    for name in ("sweep", "check"):
        install(f"sley-{name}", name, SWEEP, group="sley.commands", attribute=":sweep")
    assert "A command of sley-sweep 1.0." in cli("--help").out
    assert "sley_sweep_module" not in sys.modules
    result = cli("sweep", "--number", "5")
    assert (result.code, result.out) == (0, "swept 5\n")
    assert "Sweeps." in cli("sweep", "--help").out
    assert cli("check", plan).err.startswith("1 plan is valid; "), "own commands come first"


@pytest.mark.parametrize("code", ["command-import", "command-ambiguous"])
def test_a_broken_command_of_another_package_is_refused(cli: Cli, install: Install, code: str) -> None:
    source = "import nothing_of_this_name" if code == "command-import" else SWEEP
    for dist in ("sley-sweep", "sley-mop")[: 1 if code == "command-import" else 2]:
        install(dist, "sweep", source, group="sley.commands", attribute=":sweep")
    assert cli("--help").code == 0
    cli("sweep").expect(4, f"error[{code}]", "sley-sweep 1.0")


# -- plugins, env ------------------------------------------------------------------------------------------------------


def test_plugins_lists_records_and_broken_plugins(cli: Cli, install: Install) -> None:
    install("sley-odd", "odd", "raise RuntimeError('not today')")
    result = cli("plugins").expect(0)
    assert result.out.startswith("core  (sley-core ")
    assert "broken: plugin `odd` (sley-odd 1.0) cannot be imported" in result.out
    assert ["optimizer:", "core.adamw,", "core.sgd"] in [line.split() for line in result.out.splitlines()]


def test_plugins_describes_options(cli: Cli) -> None:
    out = cli("plugins", "core.adamw").out
    assert out.startswith("core.adamw  (optimizer, for [optimizer])")
    assert "  lr: a number above 0 (required)" in out
    assert "  eps: a number above 0 = 1e-08\n      " in out


@pytest.mark.parametrize(
    ("arguments", "code"), [(("cores",), 4), (("core.adamv",), 3), (("core", "more"), 2), (("check",), 2), (("check", "x"), 4)]
)
def test_plugins_refuses_unknown_names(cli: Cli, arguments: tuple[str, ...], code: int) -> None:
    assert cli("plugins", *arguments).code == code


def test_env_has_versions_and_no_secrets(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("SECRET_TOKEN", "hidden-from-everyone")
    out = cli("env").out
    assert all(f"\n{name} " in out for name in ("python", "torch", "sley-core", "NCCL_DEBUG"))
    assert "hidden-from-everyone" not in out
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "cannot be imported: import of torch halted" in cli("env").expect(0).out


# -- README ------------------------------------------------------------------------------------------------------------


def required_packages(folder: str) -> list[str]:
    """Returns the names of a package's requirements without `sley-`, and for other packages than core without those of core."""
    dependencies = tomli.loads((CLONE / folder / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    names = [re.split(r"[=<>~]", name)[0].removeprefix("sley-") for name in dependencies]
    return names if folder == "packages/core" else [name for name in names if name not in required_packages("packages/core")]


@pytest.mark.skipif(not (CLONE / "noxfile.py").exists(), reason="an sdist has no README of the repository")
def test_readme_s_table_has_every_package_with_its_size_and_needs() -> None:
    text = (CLONE / "README.md").read_text("utf-8")
    rows = re.findall(r"^\| \[(\S+)\]\(\S+\) \| .* \| ([\d,]+) \| (.+) \|$", text, re.MULTILINE)
    folders = {path.parent.relative_to(CLONE).as_posix() for path in CLONE.glob("*/*/pyproject.toml")}
    assert {folder for folder, _, _ in rows} == {folder for folder in folders if folder.startswith(("packages", "apps"))}
    for folder, size, words in rows:
        assert words.split(", ") == required_packages(folder), folder
        lines = sum(len(path.read_text("utf-8").splitlines()) for path in (CLONE / folder / "src").rglob("*.py"))
        assert abs(int(size.replace(",", "")) - lines) <= max(500, lines // 10), f"{folder} has {lines} lines"

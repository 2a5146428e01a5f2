"""plugins, needs, schema and env: what they print, and options that there are none of."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]
CLONE = Path(__file__).parents[3]


# -- plugins -----------------------------------------------------------------------------------------------------------


def test_plugins_lists_records(cli: Cli) -> None:
    result = cli("plugins")
    assert result.code == 0
    assert result.out.startswith("core  (sley-core ")
    assert "models.llama" in result.out
    listed = [line for line in result.out.splitlines() if line.startswith("  ")]
    columns = {len(kind) + len(gap) for kind, gap in (re.match(r"(  .*?:)( +)", line).groups() for line in listed)}
    assert len(columns) == 1, "records stand one below the other"
    core = json.loads(cli("plugins", "--format", "json").out)[0]
    assert core["records"]["optimizers"] == ["core.adamw", "core.sgd"]
    assert core["error"] is None


def test_a_broken_plugin_is_listed_as_such(cli: Cli, install: Callable[..., None]) -> None:
    install("sley-odd", "odd", "raise RuntimeError('not today')")
    result = cli("plugins")
    assert result.code == 0
    assert "broken: plugin `odd` (sley-odd 1.0) cannot be imported" in result.out
    assert cli("plugins", "odd").code == 4


def test_a_plugin_by_name_tells_every_option(cli: Cli) -> None:
    out = cli("plugins", "core.adamw").out
    assert out.startswith("core.adamw  (optimizer, for [optimizer])")
    assert "  lr: a number above 0 (required)" in out
    assert "  eps: " in out
    found = json.loads(cli("plugins", "core", "--format", "json").out)
    adamw = next(each for each in found if each["name"] == "core.adamw")
    options = {option["name"]: option for option in adamw["options"]}
    assert options["lr"]["required"]
    assert options["eps"]["default"] == 1e-8
    assert all(option["description"] for option in options.values())


def test_an_unknown_plugin_or_record(cli: Cli) -> None:
    assert cli("plugins", "cores").code == 4
    result = cli("plugins", "core.adamv")
    assert result.code == 3
    assert "did you mean `core.adamw`?" in result.err


@pytest.mark.parametrize(
    ("command", "option", "advice"),
    [
        ("run", "--save-every", "`[checkpoint]` says when a run saves itself"),
        ("run", "--overwite", "did you mean --overwrite?"),
        ("check", "--steps", "--set run.steps=VALUE"),
        ("run", "--lr", "--set optimizer.lr=VALUE"),
        ("run", "--batch-size", "--set batch.global_size=VALUE"),
        ("run", "--epochs", "a run is as long as `run.steps` says"),
        ("run", "--wandb", ""),
    ],
)
def test_an_option_that_is_none_leads_to_what_there_is(cli: Cli, plan: Path, command: str, option: str, advice: str) -> None:
    result = cli(command, plan, option)
    assert result.code == 2
    said = f" ({advice})" if advice.endswith("?") else advice
    assert f"No such option: {option}" in result.err
    assert said in result.err
    assert "Possible options" not in result.err


def test_tasks_of_srun_that_know_of_no_ranks_are_refused(cli: Cli, plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setenv("SLURM_PROCID", "1")
    result = cli("run", plan)
    assert result.code == 2
    assert "error[no-ranks]: srun has started 2 tasks" in result.err
    assert not Path("runs").exists()


# -- needs, schema, env ------------------------------------------------------------------------------------------------


def test_needs_names_what_is_missing(cli: Cli, plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sley_core.plan.loader.installed", dict)
    handler = '[[gradient_handlers]]\nuse = "dp.bucketed"\n[weights]\nuse = "isp.communicator"\npool = "pp.classes"\n'
    plan.write_text(plan.read_text("utf-8") + handler + "[checkpoint]\n", "utf-8")
    result = cli("needs", plan)
    assert result.code == 0
    assert "in a clone" in result.err, "no index has them, so the lines alone lead nowhere"
    assert "call this again" in result.err, "their records may name more"
    names = ("models", "data", "dp", "isp", "pp", "checkpoint")
    folders = ["packages/core", "apps/train-cli", *(f"packages/{name}" for name in names)]
    assert result.out.splitlines() == [f"-e {folder}" for folder in folders]
    if (CLONE / "noxfile.py").exists():  # not in an sdist
        assert all((CLONE / folder / "pyproject.toml").exists() for folder in folders)


def test_needs_says_the_same_where_all_is_installed(cli: Cli, plan: Path) -> None:
    """As they are on no index, a version would lead nowhere."""
    assert cli("needs", plan).out.splitlines() == [
        *("-e packages/core", "-e apps/train-cli", "-e packages/models", "-e packages/data")
    ]


def test_needs_names_what_defaults_and_records_name(cli: Cli, plan: Path) -> None:
    """The schedule of a pipeline names its partition and link, and `pp.measured` a timer, unless it has the seconds."""
    plan.write_text(plan.read_text("utf-8").replace("dp = 2", "pp = 2"), "utf-8")
    text = plan.read_text("utf-8") + '[pipeline]\nuse = "pp.gpipe"\n'
    text += '[weights]\nuse = "isp.communicator"\n[[gradient_handlers]]\nuse = "powersgd.reducer"\n'
    names = ["core", "train-cli", "data", "models", "isp", "pp", "powersgd"]
    for partition, more in (
        ("", []),
        ('[partition]\nuse = "pp.measured"\n', ["estimate"]),
        ("layer_costs = [1.0, 2.0, 1.0]\n", []),
    ):
        text += partition
        plan.write_text(text, "utf-8")
        result = cli("needs", plan)
        assert result.code == 0, result.err
        found = sorted(line.rpartition("/")[2].removeprefix("sley-") for line in result.out.splitlines())
        assert found == sorted([*names, *more])
        assert "call this again" not in result.err


def test_needs_names_the_default_of_a_table(cli: Cli, plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`[checkpoint]` without `use` is sley-checkpoint's, whether it is installed or not."""
    plan.write_text(plan.read_text("utf-8") + "[checkpoint]\nevery_steps = 2\n", "utf-8")
    assert "-e packages/checkpoint" in cli("needs", plan).out.splitlines()
    monkeypatch.setattr("sley_core.plan.loader.installed", dict)
    assert "-e packages/checkpoint" in cli("needs", plan).out.splitlines()


def test_needs_pins_what_is_installed(cli: Cli, plan: Path, install: Callable[..., None]) -> None:
    install("sley-odd", "odd")
    plan.write_text(plan.read_text("utf-8") + '[[metrics]]\nuse = "odd.writer"\n', "utf-8")
    assert "sley-odd==1.0" in cli("needs", plan).out.splitlines()


def test_needs_an_extra_for_a_tokenizer(cli: Cli, plan: Path) -> None:
    """The tokenizer's file has a name like a record of the plugin `metrics`, and is none."""
    tokenizer = 'sequence = 16\ntokenizer = "metrics.json"'
    plan.write_text(plan.read_text("utf-8").replace("sequence = 16", tokenizer), "utf-8")
    lines = cli("needs", plan).out.splitlines()
    assert "-e packages/data[tokenizers]" in lines
    assert not any("packages/metrics" in line for line in lines)


def test_needs_extras_for_writers(cli: Cli, plan: Path) -> None:
    writers = '[[metrics]]\nuse = "metrics.wandb"\nproject = "p"\n[[metrics]]\nuse = "metrics.tensorboard"\n'
    plan.write_text(plan.read_text("utf-8") + writers, "utf-8")
    assert "-e packages/metrics[tensorboard,wandb]" in cli("needs", plan).out.splitlines()


def test_needs_of_an_unknown_plugin(cli: Cli, plan: Path) -> None:
    plan.write_text(plan.read_text("utf-8").replace("core.adamw", "nobody.knows"), "utf-8")
    result = cli("needs", plan)
    assert (result.code, result.out) == (4, "")
    assert "plan.toml:25:7: error[plugin-unknown]" in result.err


def test_schema_is_a_schema(cli: Cli) -> None:
    schema = json.loads(cli("schema").out)
    assert schema["type"] == "object"
    assert {"run", "model", "data", "optimizer"} <= set(schema["properties"])


def test_env_tells_versions_and_no_secrets(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("SECRET_TOKEN", "hidden-from-everyone")
    result = cli("env")
    assert result.code == 0
    for name in ("python", "torch", "sley-core", "NCCL_DEBUG"):
        assert f"\n{name} " in result.out
    assert "hidden-from-everyone" not in result.out
    assert json.loads(cli("env", "--format", "json").out)["NCCL_DEBUG"] == "WARN"

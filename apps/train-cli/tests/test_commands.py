"""check, show, plugins, needs, schema and env: what they print, and where."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sley_core.plan.load import load_plan, plan_from_text

Cli = Callable[..., Any]
CLONE = Path(__file__).parents[3]


def test_a_good_plan_gets_one_line(cli: Cli, plan: Path) -> None:
    result = cli("check", plan)
    assert (result.code, result.out, result.err) == (0, "", "1 plan is fine\n")


def test_several_plans_are_checked_to_the_end(cli: Cli, plan: Path, folder: Path) -> None:
    text = plan.read_text("utf-8")
    (folder / "one.toml").write_text(text.replace("steps = 4", "steps = 0"), "utf-8")
    (folder / "two.toml").write_text(text.replace("core.adamw", "nobody.knows"), "utf-8")
    result = cli("check", "one.toml", plan, "two.toml")
    first, second, count = result.err.splitlines()
    assert first.startswith("one.toml:5:9: error[out-of-range]")
    assert second.startswith("two.toml:25:7: error[plugin-unknown]")
    assert count == "found 2 errors"
    assert result.code == 4
    assert cli("check", plan, plan).err == "2 plans are fine\n"


def test_check_of_another_world(cli: Cli, plan: Path) -> None:
    plan.write_text(plan.read_text("utf-8").replace("dp = 2", 'dp = "auto"'), "utf-8")
    assert cli("check", plan, "--world", "4").code == 0
    assert "batch-does-not-divide" in cli("check", plan, "--world", "3").err


def test_check_of_the_model(cli: Cli, own_model: Callable[[str], Path]) -> None:
    path = own_model("def layers(): return []")
    assert cli("check", path).code == 0
    result = cli("check", path, "--model")
    assert result.code == 3
    assert "error[model-factory]" in result.err


PASSES_A_NUMBER = """
    from torch import nn

    class Embed(nn.Embedding):
        def forward(self, tokens):
            return super().forward(tokens)

    class Counts(nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden), {"times": self.times}

        times = 3

    class Head(nn.Linear):
        def forward(self, state):
            return super().forward(state[0])

    def layers(data):
        return [("embed", Embed(data.vocab_size, 8)), ("counts", Counts(8, 8)), ("head", Head(8, data.vocab_size))]
"""


@pytest.mark.parametrize(("parts", "code"), [("[2, 1]", 3), ("[1, 2]", 0)])
def test_check_of_what_crosses_between_stages(
    cli: Cli, own_model: Callable[[str], Path], parts: str, code: int
) -> None:
    """A number between two layers of one stage is no matter; one that would have to be sent is told with its layer."""
    pytest.importorskip("sley_pp")
    path = own_model(PASSES_A_NUMBER)
    pipeline = ["--set", "parallel.dp=1", "--set", "parallel.pp=2", "--set", 'pipeline.use="pp.gpipe"']
    pipeline += ["--set", 'partition.use="pp.explicit"', "--set", f"partition.layers={parts}"]
    result = cli("check", path, "--model", *pipeline)
    assert result.code == code, result.err
    assert ("error[boundary-type]" in result.err) == (code == 3)
    assert "was not looked at" not in result.err
    if code:
        assert "the output of the layer 'counts' holds a value of type int" in result.err
        assert "plan.toml:" in result.err


GIVEN = """
import torch

class Table(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(256))

    def forward(self, tokens):
        return self.weight[tokens]

def layers():
    return [Table()]
"""


def test_a_model_needs_no_method_for_values_that_its_factory_gave(cli: Cli, own_model: Callable[[str], Path]) -> None:
    result = cli("check", own_model(GIVEN), "--model")
    assert result.code == 0, result.err


# -- show --------------------------------------------------------------------------------------------------------------


def test_show_is_a_plan_with_origins(cli: Cli, plan: Path) -> None:
    result = cli("show", "plan.toml", "--set", "run.seed=7")
    assert result.err == ""
    lines = [line.partition("  # ") for line in result.out.splitlines()]
    origins = {value.strip(): origin for value, _, origin in lines}
    assert origins["steps = 4"] == "plan.toml:5:1"
    assert origins["seed = 7"] == "--set #1"
    assert origins['folder = "runs"'] == "default"
    assert origins['use = "core.each"'] == "core"
    shown = result.out.partition("# world")[0]
    assert plan_from_text(shown, folder=plan.parent) == load_plan(plan, ["run.seed=7"])


def test_show_of_ranks_groups_and_handlers(cli: Cli, plan: Path) -> None:
    out = cli("show", plan, "--set", "parallel.dp=4").out
    assert "# world of 4: pp 1, dp 4, sp 1, wdp 4, wp 1" in out
    assert "dp[0-3]" in out
    assert out.rstrip().endswith("1  core.each  (reducer)")


def test_show_of_one_rank(cli: Cli, plan: Path) -> None:
    out = cli("show", plan, "--rank", "1").out
    rows = out.partition("# world")[2].partition("# groups")[0].split("\n")
    assert [row.split() for row in rows if row.strip()][2:] == [["1", "0", "1", "0", "1", "0"]]
    result = cli("show", plan, "--rank", "2")
    assert result.code == 3
    assert "the ranks are 0 to 1" in result.err


def test_a_large_world_is_shown_in_a_few_lines(cli: Cli, plan: Path) -> None:
    arguments = ("show", plan, "--set", 'parallel.dp="auto"', "--world", "1024")
    result = cli(*arguments)
    assert len(result.out.splitlines()) < 150
    assert "and 992 more" in result.out
    assert len(json.loads(cli(*arguments, "--format", "json").out)["ranks"]) == 1024


def test_show_as_json(cli: Cli, plan: Path) -> None:
    shown = json.loads(cli("show", "plan.toml", "--format", "json").out)
    values = {each["path"]: each for each in shown["plan"]}
    assert values["run.steps"] == {
        "path": "run.steps",
        "value": 4,
        "origin": {"kind": "file", "file": "plan.toml", "line": 5, "column": 1},
    }
    assert shown["world"] == 2
    assert shown["ranks"][1]["dp"] == 1
    assert {"axis": "control", "lane": "main", "backend": "gloo", "ranks": [0, 1]} in shown["groups"]
    assert shown["gradient_handlers"] == [{"name": "core.each", "role": "reducer", "tolerance": 0.0}]


def test_show_says_which_handler_is_not_exact(cli: Cli, plan: Path, install: Callable[..., None]) -> None:
    install(
        "sley-odd",
        "odd",
        """
        from sley_core.hookspecs import hookimpl
        from sley_core.table import Table
        from sley_core.records import GradientHandlerRecord

        class Config(Table):
            coarse: bool = True

        @hookimpl
        def sley_gradient_handlers():
            tolerance = lambda config: 0.125 if config.coarse else 0.0
            return [GradientHandlerRecord(
                name="sum", config=Config, build="nowhere:Nothing", role="reducer", tolerance_of=tolerance)]
        """,
    )
    plan.write_text(plan.read_text("utf-8") + '[[gradient_handlers]]\nuse = "odd.sum"\n', "utf-8")
    assert cli("show", plan).out.rstrip().endswith("1  odd.sum  (reducer, not exact: within 0.125)")
    assert cli("show", plan, "--set", "gradient_handlers.0.coarse=false").out.rstrip().endswith("1  odd.sum  (reducer)")


# -- plugins -----------------------------------------------------------------------------------------------------------


def test_plugins_lists_records(cli: Cli) -> None:
    result = cli("plugins")
    assert result.code == 0
    assert result.out.startswith("core  (sley-core ")
    assert "core.llama" in result.out
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
        ("run", "--resume", "a run cannot be resumed yet"),
        ("run", "--overwite", "did you mean --overwrite?"),
        ("check", "--steps", "--set run.steps=VALUE"),
        ("run", "--lr", "--set optimizer.lr=VALUE"),
        ("run", "--batch-size", "--set batch.global_size=VALUE"),
        ("run", "--epochs", "a run is as long as `run.steps` says"),
        ("run", "--wandb", ""),
    ],
)
def test_an_option_that_is_none_leads_to_what_there_is(
    cli: Cli, plan: Path, command: str, option: str, advice: str
) -> None:
    result = cli(command, plan, option)
    assert result.code == 2
    said = f" ({advice})" if advice.endswith("?") else advice
    assert f"No such option: {option}" in result.err
    assert said in result.err
    assert "Possible options" not in result.err


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (
            "steps = 4",
            "steps = 4\nepochs = 3",
            "`epochs` is not a key of [run] (hint: a run is as long as `run.steps` says",
        ),
        ("steps = 4", "steps = 4\nresume = true", "`resume` is not a key of [run] (hint: a run cannot be resumed yet"),
        (
            "[data]",
            "[checkpoint]\nevery = 3\n[data]",
            "`checkpoint` is not a table of a plan (hint: a run cannot be resumed yet",
        ),
        (
            "plan = 1",
            "plan = 1\nsave_every = 3",
            "`save_every` is not a key of a plan (hint: a run cannot be resumed yet",
        ),
    ],
)
def test_what_is_not_built_is_said_of_a_plan_s_key_too(
    cli: Cli, plan: Path, before: str, after: str, told: str
) -> None:
    plan.write_text(plan.read_text("utf-8").replace(before, after), "utf-8")
    result = cli("check", plan)
    assert result.code == 3
    assert told in result.err


def test_tasks_of_srun_that_know_of_no_ranks_are_refused(cli: Cli, plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setenv("SLURM_PROCID", "1")
    result = cli("run", plan)
    assert result.code == 2
    assert "error[no-ranks]: srun has started 2 tasks" in result.err
    assert not Path("runs").exists()


# -- needs, schema, env ------------------------------------------------------------------------------------------------


def test_needs_names_what_is_missing(cli: Cli, plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sley_core.loader.installed", dict)
    handler = '[[gradient_handlers]]\nuse = "dp.bucketed"\n[weights]\nuse = "isp.communicator"\npool = "pp.classes"\n'
    plan.write_text(plan.read_text("utf-8") + handler, "utf-8")
    result = cli("needs", plan)
    assert result.code == 0
    assert "in a clone" in result.err, "no index has them, so the lines alone lead nowhere"
    folders = ["packages/core", "apps/train-cli", "packages/dp", "packages/isp", "packages/pp"]
    assert result.out.splitlines() == [f"-e {folder}" for folder in folders]
    if (CLONE / "noxfile.py").exists():  # not in an sdist
        assert all((CLONE / folder / "pyproject.toml").exists() for folder in folders)


def test_needs_says_the_same_where_all_is_installed(cli: Cli, plan: Path) -> None:
    """As they are on no index, a version would lead nowhere."""
    assert cli("needs", plan).out.splitlines() == ["-e packages/core", "-e apps/train-cli"]


def test_needs_pins_what_is_installed(cli: Cli, plan: Path, install: Callable[..., None]) -> None:
    install("sley-odd", "odd")
    plan.write_text(plan.read_text("utf-8") + '[[metrics]]\nuse = "odd.writer"\n', "utf-8")
    assert "sley-odd==1.0" in cli("needs", plan).out.splitlines()


def test_needs_an_extra_for_a_tokenizer(cli: Cli, plan: Path) -> None:
    plan.write_text(plan.read_text("utf-8").replace("sequence = 16", 'sequence = 16\ntokenizer = "t.json"'), "utf-8")
    assert cli("needs", plan).out.startswith("-e packages/core[tokenizers]\n")


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


def test_a_plan_without_stages_has_no_timeline(cli: Cli, plan: Path) -> None:
    result = cli("show", "plan.toml", "--timeline")
    assert result.code == 3
    assert "no-pipeline" in result.err

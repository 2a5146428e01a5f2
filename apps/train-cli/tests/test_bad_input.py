"""Whatever a user gets wrong is one clear diagnostic with its place and exit code; no process is started, nothing written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PLAN_INVALID, PLUGIN = 3, 4

HANDLER = '[[gradient_handlers]]\nuse = "core.each"\n'

Refused = Callable[..., None]


@pytest.fixture
def refused(folder: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, no_children: None) -> Refused:
    """`refused(path, code, at)`: `run` and `check` end with one diagnostic of that code, its caret at the text `at`."""
    started: list[object] = []

    class Watched(subprocess.Popen):  # type: ignore[type-arg]
        """torch may ask the machine about itself; what must not start is a rank."""

        def __init__(self, args: Any, *more: Any, **options: Any) -> None:
            if "train_cli" in str(args):
                started.append(args)
            super().__init__(args, *more, **options)

    monkeypatch.setattr(subprocess, "Popen", Watched)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def refuse(
        path: Path, code: str, at: str | None, *options: str, exit_code: int = PLAN_INVALID, command: str = "run"
    ) -> None:
        before = files(folder)
        result = cli(command, path, "--message-format", "json", *options)
        found = [json.loads(line) for line in result.err.splitlines()]
        assert [each["code"] for each in found] == [code], result.err
        assert result.code == exit_code, result.err
        assert result.out == ""
        assert text_at(path, found[0]).startswith(at or ""), found[0]
        assert (found[0]["file"] is not None) == (at is not None), found[0]
        assert files(folder) == before
        assert not started

    return refuse


def files(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def replace(plan: Path, old: str, new: str) -> None:
    text = plan.read_text("utf-8")
    assert old in text
    plan.write_text(text.replace(old, new), "utf-8")


def text_at(path: Path, diagnostic: dict[str, object]) -> str:
    """What stands in the plan where the diagnostic points, or the name of the file it names as a whole."""
    line, column = diagnostic["line"], diagnostic["column"]
    if not isinstance(line, int) or not isinstance(column, int):
        return str(diagnostic["file"])
    return path.read_bytes().decode("utf-8", "replace").splitlines()[line - 1][column - 1 :]


def test_no_such_plan(folder: Path, refused: Refused) -> None:
    refused(Path("absent.toml"), "plan-missing", "absent.toml")


def test_a_folder(folder: Path, refused: Refused) -> None:
    (folder / "plans").mkdir()
    refused(Path("plans"), "plan-is-folder", "plans")


def test_not_utf8(plan: Path, refused: Refused) -> None:
    plan.write_bytes(plan.read_bytes() + b'x = "\xff"\n')
    refused(plan, "plan-not-utf8", "\N{REPLACEMENT CHARACTER}")


EDITS = {
    "syntax error": ("steps = 4", "steps = = 4", "syntax", "= 4"),
    "unknown table": ("[batch]", "[batsch]\na = 1\n[batch]", "unknown-table", "batsch"),
    "unknown key": ("micro_size", "micro_sise = 1\nmicro_size", "unknown-key", "micro_sise"),
    "unknown key of a record": ("hidden =", "hiden = 3\nhidden =", "unknown-key", "hiden"),
    "missing key": ("steps = 4", "", "missing-key", "[run]"),
    "bool for an integer": ("steps = 4", "steps = true", "wrong-type", "true"),
    "string for an integer": ("steps = 4", 'steps = "5"', "wrong-type", '"5"'),
    "out of range": ("micro_size = 1", "micro_size = 0", "out-of-range", "0"),
    "unknown record": ("core.adamw", "core.adamv", "unknown-record", '"core.adamv"'),
    "batch that does not divide": ("global_size = 4", "global_size = 5", "batch-does-not-divide", "5"),
    "precision that is to come": ("[parallel]", '[precision]\ngradients = "bf16"\n[parallel]', None, '"bf16"'),
    "slices without an attention": ("dp = 2", "dp = 2\nsp = 2", "sequence-missing", "2"),
    "stages without a schedule": ("dp = 2", "dp = 2\npp = 2", "pipeline-missing", "2"),
    "no handler for the sum": ("plan = 1", "plan = 1\ngradient_handlers = []", "handler-missing", "[]"),
    "handler listed twice": ("dp = 2", "dp = 2\n" + 2 * HANDLER, "handler-twice", '"core.each"'),
    "data file missing": ("corpus.txt", "absent.txt", "data-missing", '"absent.txt"'),
    "data file empty": ("corpus.txt", "empty.txt", "data-empty", '"empty.txt"'),
    "data shorter than a sequence": ("sequence = 16", "sequence = 100000", "data-short", "100000"),
}
"""What is replaced by what in a valid plan, the code, and the text under the caret."""


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("command", ["run", "check"])
def test_wrong_plan(plan: Path, folder: Path, refused: Refused, name: str, command: str) -> None:
    old, new, code, at = EDITS[name]
    (folder / "empty.txt").touch()
    replace(plan, old, new)
    refused(plan, code or "precision-unsupported", at, command=command)


def test_all_problems_at_once(plan: Path, cli: Callable[..., Any]) -> None:
    replace(plan, "steps = 4", "steps = true")
    replace(plan, "lr =", "lrr =")
    result = cli("run", plan, "--message-format", "short")
    *lines, count = result.err.splitlines()
    assert [line.split("error[")[1].split("]")[0] for line in lines] == ["wrong-type", "missing-key", "unknown-key"]
    assert count == "found 3 errors"


def test_another_world_than_the_plan_says(plan: Path, refused: Refused) -> None:
    refused(plan, "layout", "2", "--nproc", "3")
    refused(plan, "layout", "2", "--world", "3", command="check")


def test_an_override_has_a_place_too(plan: Path, refused: Refused) -> None:
    refused(plan, "unknown-key", "--set #2", "--set", "run.seed=3", "--set", "run.sed=3")


# -- plugins -----------------------------------------------------------------------------------------------------------


def with_handlers(plan: Path, *names: str) -> Path:
    tables = "".join(f'[[gradient_handlers]]\nuse = "{name}"\n' for name in names)
    plan.write_text(plan.read_text("utf-8") + tables, "utf-8")
    return plan


def handlers(*records: str) -> str:
    """The source of a plugin with these gradient-handler records."""
    return f"""
        from sley_core.hookspecs import hookimpl
        from sley_core.table import Table
        from sley_core.records import GradientHandlerRecord, OptimizerRecord
        from sley_core.optim.config import AdamWConfig

        class Config(Table):
            "Nothing to choose."

        def record(name, role, **more):
            return GradientHandlerRecord(name=name, config=Config, build="nowhere:Nothing", role=role, **more)

        @hookimpl
        def sley_gradient_handlers():
            return [{", ".join(records)}]

        @hookimpl
        def sley_optimizers():
            return [OptimizerRecord(name="whole", config=AdamWConfig, build="nowhere:Nothing", scope="per_matrix")]
    """


def test_plugin_of_ours_missing(plan: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sley_core.loader.installed", dict)
    refused(with_handlers(plan, "dp.bucketed"), "plugin-missing", '"dp.bucketed"', exit_code=PLUGIN)


def test_plugin_unknown(plan: Path, refused: Refused) -> None:
    refused(with_handlers(plan, "nobody.knows"), "plugin-unknown", '"nobody.knows"', exit_code=PLUGIN)


def test_plugin_ambiguous(plan: Path, install: Callable[..., None], refused: Refused) -> None:
    install("sley-odd", "odd")
    install("sley-other", "odd")
    refused(with_handlers(plan, "odd.sum"), "plugin-ambiguous", '"odd.sum"', exit_code=PLUGIN)


def test_plugin_incompatible(plan: Path, install: Callable[..., None], refused: Refused) -> None:
    install("sley-odd", "odd", requires="sley-core>=99")
    refused(with_handlers(plan, "odd.sum"), "plugin-incompatible", '"odd.sum"', exit_code=PLUGIN)


def test_plugin_fails_to_import(plan: Path, install: Callable[..., None], refused: Refused) -> None:
    install("sley-odd", "odd", "raise RuntimeError('not today')")
    refused(with_handlers(plan, "odd.sum"), "plugin-import", '"odd.sum"', exit_code=PLUGIN)


def test_two_handlers_for_one_job(plan: Path, install: Callable[..., None], refused: Refused) -> None:
    install("sley-odd", "odd", handlers('record("sum", "reducer")'))
    refused(with_handlers(plan, "core.each", "odd.sum"), "handler-conflict", '"odd.sum"')


def test_handlers_in_an_impossible_order(plan: Path, install: Callable[..., None], refused: Refused) -> None:
    install("sley-odd", "odd", handlers('record("cut", "transform", after=("reducer",))'))
    refused(with_handlers(plan, "odd.cut", "core.each"), "handler-order", '"odd.cut"')


def test_optimizer_that_does_not_fit_the_layout(plan: Path, install: Callable[..., None], refused: Refused) -> None:
    install("sley-odd", "odd", handlers('record("shards", "reducer", result="shard")'))
    with_handlers(plan, "odd.shards")
    replace(plan, "core.adamw", "odd.whole")
    refused(plan, "optimizer-layout", '"odd.whole"')


# -- the user's own code -----------------------------------------------------------------------------------------------


def test_factory_not_importable(own_model: Callable[[str], Path], refused: Refused) -> None:
    path = own_model("import nothing_of_this_name")
    refused(path, "factory-import", '"own:layers"')


def test_factory_returns_no_layers(own_model: Callable[[str], Path], refused: Refused) -> None:
    refused(own_model("def layers(): return 42"), "model-factory", "[model]")


def test_module_that_cannot_be_materialised(own_model: Callable[[str], Path], refused: Refused) -> None:
    path = own_model(
        """
        import torch

        class Bare(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.empty(256, 256))

            def forward(self, tokens):
                return self.weight[tokens]

        def layers():
            return [Bare()]
        """
    )
    refused(path, "model-init", "[model]")


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("self.rows = torch.nn.Parameter(self.weight[:4])", "model-init"),
        ("self.kept = [self.weight]", "model-init"),
        ("self.weight.register_post_accumulate_grad_hook(lambda weight: None)", "model-hook"),
    ],
    ids=["shared memory", "held unregistered", "hook on a sum"],
)
def test_parameters_that_a_run_would_not_train_alike(
    own_model: Callable[[str], Path], refused: Refused, line: str, code: str
) -> None:
    path = own_model(
        f"""
        import torch

        class Table(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.randn(256, 256))
                {line}

            def forward(self, tokens):
                return self.weight[tokens]

        def layers():
            return [Table()]
        """
    )
    refused(path, code, "[model]")


def test_a_plain_error_in_a_factory_is_placed_in_its_file(
    own_model: Callable[[str], Path], cli: Callable[..., Any], folder: Path
) -> None:
    path = own_model("def layers():\n    return [1 / 0]")
    result = cli("run", path, "--message-format", "short")
    assert result.code == PLAN_INVALID
    assert "ZeroDivisionError" in result.err
    assert "Traceback" not in result.err
    assert not (folder / "runs").exists()


# -- the run folder ----------------------------------------------------------------------------------------------------


def test_run_folder_exists(plan: Path, folder: Path, refused: Refused) -> None:
    (folder / "runs" / "small").mkdir(parents=True)
    (folder / "runs" / "small" / "notes.txt").write_text("mine", "utf-8")
    refused(plan, "run-folder", '"small"')
    # Not even then: it is not the folder of a run.
    refused(plan, "run-folder", '"small"', "--overwrite")


def test_run_folder_below_a_file(plan: Path, folder: Path, refused: Refused) -> None:
    (folder / "runs").touch()
    refused(plan, "run-folder", "[run]")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_run_folder_not_writable(plan: Path, folder: Path, refused: Refused) -> None:
    (folder / "runs").mkdir(mode=0o500)
    refused(plan, "run-folder", "[run]")

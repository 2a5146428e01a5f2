"""What a shell is offered, asked as the shell asks: through the program's own entry."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from started_program import Result

Cli = Callable[..., Result]


@pytest.fixture
def offered(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """`offered("show", "pl")` gives what stands behind the words, of which the last is not complete yet."""

    def ask(*words: object) -> list[str]:
        monkeypatch.setenv("_TRAIN_CLI_COMPLETE", "complete_zsh")
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", " ".join(["train-cli", *map(str, words)]))
        found = cli().out
        return [line.split('"')[1].replace("\\\\:", ":") for line in found.splitlines() if line.count('"') > 1]

    return ask


def test_keys_of_tables_and_of_the_plans_records(offered: Callable[..., list[str]], plan: Path) -> None:
    assert "batch.micro_size=" in offered("show", plan, "--set", "batch.")
    assert "optimizer.lr=" in offered("show", plan, "--set", "optimizer.l")
    assert "model.num_layers=" in offered("check", plan, "--set", "model.")
    assert offered("show", plan, "--set", "nothing") == []


def test_a_plan_that_is_wrong_still_has_keys(offered: Callable[..., list[str]], plan: Path) -> None:
    plan.write_text("nonsense")
    assert "run.steps=" in offered("show", plan, "--set", "run.st")


def test_records_behind_use(offered: Callable[..., list[str]], plan: Path) -> None:
    assert "optimizer.use=core.adamw" in offered("show", plan, "--set", "optimizer.use=core.a")
    assert offered("show", plan, "--set", "loss.use=core.adam") == [], "no optimizer is a loss"
    assert offered("show", plan, "--set", "run.use=") == []


def test_plugins_and_their_records(offered: Callable[..., list[str]], folder: Path) -> None:
    assert "core" in offered("plugins", "co")
    assert "core.adamw" in offered("plugins", "core.ad")

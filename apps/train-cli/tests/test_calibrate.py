"""`calibrate` writes a machine file that estimates read, measured in this process or with ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sley_estimate.machine import load_machine
from sley_estimate.testing import shortly
from train_cli.main import main

pytestmark = pytest.mark.timeout(180)
Cli = Callable[..., Any]


@pytest.fixture
def few_sizes() -> Iterator[None]:
    with shortly():
        yield


@pytest.mark.usefixtures("few_sizes")
def test_a_plan_is_drawn_in_the_seconds_of_the_machine_that_timed_it(cli: Cli, plan: Path, folder: Path) -> None:
    result = cli("calibrate", "--out", "machine.toml", "--plan", plan)
    assert (result.code, result.out) == (0, "")
    layers = load_machine(folder / "machine.toml").layers
    assert f"machine.toml has the device, {len(layers)} layers, under core.keep, core.recompute" in result.err
    assert result.err.strip().endswith(", on micro-batches of 1, 4")
    assert [layer.name for layer in layers[:3]] == ["embed", "blocks.0", "head"]
    drawn = "show", plan, "--timeline", "--machine", "machine.toml", "--set", "parallel.dp=1"
    shown = cli(*drawn)
    assert shown.code == 0
    assert "a step takes " in shown.out
    assert "all 3 layers were timed on this machine" in shown.out
    data = json.loads(cli("estimate", plan, "--machine", "machine.toml", "--set", "parallel.dp=1", "--format", "json").out)
    assert data["seconds"]["step"] >= data["seconds"]["stages"][0]["computes"] > 0
    assert [layer["source"] for layer in data["seconds"]["layers"]] == ["measured"] * 3
    other = cli(*drawn, "--set", "data.sequence=8")
    assert "all 3 layers were computed from their operators" in other.out


@pytest.mark.usefixtures("few_sizes")
def test_a_file_that_is_there_is_replaced_only_if_asked(cli: Cli, folder: Path) -> None:
    (folder / "machine.toml").write_text("mine")
    result = cli("calibrate", "--out", "machine.toml")
    assert result.code == 2
    assert "machine-exists" in result.err
    assert (folder / "machine.toml").read_text() == "mine"
    assert cli("calibrate", "--out", "machine.toml", "--force").code == 0
    assert load_machine(folder / "machine.toml").device.kind == "cpu"


def test_what_cannot_be_meant_is_refused_before_anything_is_measured(cli: Cli, folder: Path) -> None:
    for arguments, code in (
        (("--out", "none/machine.toml"), "machine-folder"),
        (("--out", "machine.toml", "--set", "batch.micro_size=1"), "calibrate-plan"),
    ):
        result = cli("calibrate", *arguments)
        assert result.code == 2
        assert code in result.err
    result = cli("show", "plan.toml", "--machine", "machine.toml")
    assert result.code == 2
    assert "--timeline" in result.err
    assert cli("calibrate", "--out", "machine.toml", "--plan", "none.toml").code == 3
    assert not (folder / "machine.toml").exists()


def calibrated(arguments: list[str]) -> int:
    """The exit code of a rank's command."""
    with shortly():
        return main(["calibrate", *arguments])


def test_ranks_measure_what_they_exchange_and_the_first_writes_it(ranks: Callable[..., Any], folder: Path) -> None:
    assert ranks(2, 120, init=False)(calibrated, ["--out", str(folder / "machine.toml")]) == [0, 0]
    check_links(folder)


def check_links(folder: Path) -> None:
    links = load_machine(folder / "machine.toml").links
    assert links.ranks_per_host == 2
    assert links.same_host is not None
    assert links.same_host.sum is not None
    assert sorted(path.name for path in folder.iterdir() if path.suffix == ".toml") == ["machine.toml"]

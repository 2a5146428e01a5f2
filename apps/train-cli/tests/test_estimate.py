"""`estimate` and `calibrate`: what they print before a run, and the machine file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from sley_core.errors import UsageError
from sley_estimate.commands.estimate import UNCOMPILED, parse_size
from sley_estimate.machine import load_machine
from sley_estimate.testing import short_calibration, small_machine
from train_cli.main import main

pytestmark = pytest.mark.timeout(180)
Cli = Callable[..., Any]


def test_each_stage_is_told_with_its_parts_and_whether_it_fits(cli: Cli, plan: Path) -> None:
    result = cli("estimate", plan, "--memory", "1GiB")
    assert result.code == 0, result.err
    assert result.out.startswith("stage 0 (ranks 0 to 1): ")
    assert "    optimizer states " in result.out
    assert "on stage 0, which fits in 1.00 GiB " in result.out
    result = cli("estimate", plan, "--memory", "20000B")
    assert (result.code, "exceeds 19.53 KiB by " in result.out) == (1, True)


def test_a_compiled_plan_is_estimated_as_if_it_were_not_compiled(cli: Cli, plan: Path) -> None:
    result = cli("estimate", plan, changes=["model.compile=true"])
    assert result.code == 0, result.err
    assert result.out.splitlines() == [*cli("estimate", plan).out.splitlines(), UNCOMPILED]


def test_hosts_that_are_given_are_those_that_the_machine_prices(cli: Cli, plan: Path) -> None:
    """And not those of the machine file."""
    links = {"ranks_per_host": 8, "same_host": {"latency_s": 1e-5, "bandwidth": 1e10}}
    links["other_host"] = {"latency_s": 1.0, "bandwidth": 1e10}
    (plan.parent / "machine.toml").write_text(tomli_w.dumps(small_machine(links=links)), "utf-8")
    machine = ("--machine", plan.parent / "machine.toml")
    one_host, two_hosts = (("--nodes", "1", "--per-node", "2"), ("--nodes", "2", "--per-node", "1"))
    for command, hosts in ((("estimate",), one_host), (("show", "--timeline"), two_hosts)):
        told = cli(command[0], plan, *command[1:], *machine, *hosts)
        assert told.code == 0, told.err
        step = float(re.findall(r"a step takes ([\d.e-]+) s", told.out)[0])
        assert (step > 1.0) == (hosts == two_hosts), command


@pytest.mark.parametrize("leaves", [False, True])
def test_json_has_the_curve_of_a_step(cli: Cli, plan: Path, leaves: bool) -> None:
    """States that leave between steps are copied side by side once, behind the first update: the peak is there."""
    changes = ["offload=[{use='memory.optimizer_states', when='between_steps'}]"] if leaves else []
    (stage,) = json.loads(cli("estimate", plan, "--format", "json", changes=changes).out)["stages"]
    assert max(num_bytes for _, num_bytes in stage["curve"]) == stage["peak"] == sum(stage["alive"].values())
    if leaves:
        assert " in the update of the first step" in cli("estimate", plan, changes=changes).out.splitlines()[0]


def test_an_estimate_starts_and_writes_nothing(cli: Cli, plan: Path) -> None:
    (plan.parent / "held_out.txt").write_text("the sley beats home\n" * 60, "utf-8")
    before = sorted(plan.parent.iterdir())
    saves = ["checkpoint.every_steps=1", "evaluation={ every = 1, keep_best = 'held_out_loss' }"]
    saves += ["data.held_out_files=['held_out.txt']"]
    result = cli("estimate", plan, changes=saves)
    assert result.code == 0, result.err
    assert sorted(plan.parent.iterdir()) == before


def test_it_finds_what_only_a_step_shows(cli: Cli, own_model: Callable[..., Path]) -> None:
    """The shapes of its second layer do not fit, and no check without a step calls it."""
    plan = own_model(
        """
        from torch import nn

        class Embeds(nn.Embedding):
            def forward(self, tokens):
                return super().forward(tokens)

        def layers():
            return [Embeds(256, 8), nn.Linear(9, 256)]
        """
    )
    result = cli("estimate", plan)
    assert result.code == 1
    assert "in layer `1` (Linear) in microbatch 0" in result.err


@pytest.mark.parametrize("text", ["KiB", "-1KiB", "much"])
def test_what_is_no_size_is_told_the_units(text: str) -> None:
    with pytest.raises(UsageError, match="KiB") as raised:
        parse_size(text)
    assert raised.value.diagnostics[0].code == "memory-size"


# -- calibrate ---------------------------------------------------------------------------------------------------------


@short_calibration()
def test_a_plan_is_drawn_in_the_seconds_of_the_machine_that_timed_it(cli: Cli, plan: Path, folder: Path) -> None:
    result = cli("calibrate", "--out", "machine.toml", "--plan", plan)
    assert (result.code, result.out) == (0, "")
    layers = load_machine(folder / "machine.toml").layers
    assert result.err.strip().endswith("machine.toml has the device, 3 layers under core.keep with microbatches of 1")
    assert [layer.name for layer in layers] == ["embed", "blocks.0", "head"]
    drawn = "show", plan, "--timeline", "--machine", "machine.toml", "--set", "parallel.dp=1"
    shown = cli(*drawn)
    assert shown.code == 0
    assert "a step takes " in shown.out
    assert "all 3 layers were measured on this machine" in shown.out
    data = json.loads(cli("estimate", plan, "--machine", "machine.toml", "--set", "parallel.dp=1", "--format", "json").out)
    assert data["seconds"]["step"] >= data["seconds"]["stages"][0]["computes"] > 0
    assert [layer["source"] for layer in data["seconds"]["layers"]] == ["measured"] * 3
    other = cli(*drawn, "--set", "data.sequence=8")
    assert "all 3 layers were computed from their operators" in other.out


@short_calibration()
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


@short_calibration()
def calibrated(arguments: list[str]) -> int:
    """The exit code of a rank's command."""
    return main(["calibrate", *arguments])


@pytest.mark.campaign
def test_ranks_measure_what_they_exchange_and_the_first_writes_it(ranks: Callable[..., Any], folder: Path) -> None:
    assert ranks(2, 120, init=False)(calibrated, ["--out", str(folder / "machine.toml")]) == [0, 0]
    links = load_machine(folder / "machine.toml").links
    assert links.ranks_per_host == 2
    assert links.same_host is not None
    assert links.same_host.sum is not None
    assert [path.name for path in folder.glob("*.toml")] == ["machine.toml"]

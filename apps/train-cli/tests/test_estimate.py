"""`estimate` and `run --dry-run`: what a user is told of a run's memory before it runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from sley_core.errors import UsageError
from sley_estimate.commands.estimate import num_bytes
from sley_estimate.testing import small_machine

Cli = Callable[..., Any]


def test_each_stage_is_told_with_its_parts(cli: Cli, plan: Path) -> None:
    result = cli("estimate", plan, "--memory", "1GiB")
    assert result.code == 0, result.err
    assert result.out.startswith("stage 0 (ranks 0 to 1): ")
    assert "    optimizer states " in result.out
    assert "on stage 0: fits into 1.00 GiB, " in result.out


def test_what_does_not_fit_ends_with_1(cli: Cli, plan: Path) -> None:
    result = cli("estimate", plan, "--memory", "20000B")
    assert result.code == 1
    assert "does not fit into 19.53 KiB, " in result.out


def test_hosts_that_are_given_are_those_that_the_machine_prices(cli: Cli, plan: Path) -> None:
    """They were those of the machine file, whatever `--per-node` said."""
    links = {"ranks_per_host": 8, "same_host": {"latency_s": 1e-5, "bandwidth": 1e10}}
    links["other_host"] = {"latency_s": 1.0, "bandwidth": 1e10}
    (plan.parent / "machine.toml").write_text(tomli_w.dumps(small_machine(links=links)), "utf-8")
    for command in ("estimate", "show"):
        asked = (command, plan, "--machine", plan.parent / "machine.toml", *(["--timeline"] if command == "show" else []))
        steps = []
        for hosts in (("--nodes", "1", "--per-node", "2"), ("--nodes", "2", "--per-node", "1")):
            told = cli(*asked, *hosts)
            assert told.code == 0, told.err
            steps.append(float(re.findall(r"a step takes ([\d.e-]+) s", told.out)[0]))
        assert steps[0] < 1.0 < steps[1]


def test_json_has_the_curve_of_a_step(cli: Cli, plan: Path) -> None:
    result = cli("estimate", plan, "--format", "json")
    (stage,) = json.loads(result.out)["stages"]
    assert max(num_bytes for _, num_bytes in stage["curve"]) == stage["peak"] == sum(stage["alive"].values())


def test_a_peak_of_the_first_step_is_told_and_drawn(cli: Cli, plan: Path) -> None:
    """States that leave between steps are copied side by side once, behind the first update."""
    states = '[[offload]]\nuse = "memory.optimizer_states"\nwhen = "between_steps"\n'
    plan.write_text(plan.read_text("utf-8") + states, "utf-8")
    result = cli("estimate", plan)
    assert " in the update of the first step" in result.out.splitlines()[0]
    (stage,) = json.loads(cli("estimate", plan, "--format", "json").out)["stages"]
    assert max(num_bytes for _, num_bytes in stage["curve"]) == stage["peak"]


def test_a_dry_run_starts_and_writes_nothing(cli: Cli, plan: Path) -> None:
    before = sorted(plan.parent.iterdir())
    result = cli("run", plan, "--dry-run")
    assert result.code == 0, result.err
    assert "dry run on 2 ranks: steps can be taken; the most is " in result.err
    assert sorted(plan.parent.iterdir()) == before


def test_a_dry_run_finds_what_only_a_step_shows(cli: Cli, own_model: Callable[..., Path]) -> None:
    """The shapes of its second layer do not fit, and no check without a step calls it."""
    plan = own_model(
        """
        from torch import nn

        class Embeds(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Embedding(256, 8)

            def forward(self, tokens):
                return self.table(tokens)

        def layers():
            return [Embeds(), nn.Linear(9, 256)]
        """
    )
    result = cli("run", plan, "--dry-run")
    assert result.code == 1
    assert "in layer `1` (Linear) of micro-batch 0" in result.err


@pytest.mark.parametrize("text", ["100", "0KiB", "KiB", "-1KiB", "1kib", "1 PiB"])
def test_what_is_no_size_is_told_the_units(text: str) -> None:
    with pytest.raises(UsageError, match="KiB") as raised:
        num_bytes(text)
    assert raised.value.diagnostics[0].code == "memory-size"

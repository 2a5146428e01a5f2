"""`estimate` and `calibrate`: their output before a run, and the machine file."""

import json
import re
from pathlib import Path
from unittest.mock import patch

import pytest
import tomli_w
from started_program import Cli

from sley_core.errors import UsageError
from sley_estimate.commands import UNCOMPILED_NOTE, parse_size
from sley_estimate.machine import load_machine
from sley_estimate.testing import short_calibration, small_machine
from train_cli.faults import Fault

pytestmark = pytest.mark.timeout(180)


def test_stages_have_their_parts_and_are_compared_with_the_memory(cli: Cli, plan: Path) -> None:
    """The estimate writes nothing, and ignores `[model] compile`."""
    (plan.parent / "held_out.txt").write_text("the sley beats home\n" * 60, "utf-8")
    files = sorted(plan.parent.iterdir())
    saves = ["checkpoint.every_steps=1", "evaluation={ every = 1, keep_best = 'held_out_loss' }"]
    saves += ["data.held_out_files=['held_out.txt']"]
    result = cli("estimate", plan, "--memory", "1GiB", changes=[*saves, "model.compile=true"]).expect(0)
    assert result.out.startswith("stage 0 (ranks 0 to 1): ")
    assert "    optimizer states " in result.out
    assert "on stage 0, which fits in 1.0 GiB " in result.out
    assert UNCOMPILED_NOTE in result.out
    assert sorted(plan.parent.iterdir()) == files
    assert "exceeds 20 KiB by " in cli("estimate", plan, "--memory", "20000B").expect(1).out


def test_seconds_are_those_of_the_hosts_in_the_options(cli: Cli, plan: Path) -> None:
    """The hosts of the machine file do not count."""
    links = {"ranks_per_host": 8, "same_host": {"latency_s": 1e-5, "bandwidth": 1e10}}
    links["other_host"] = {"latency_s": 1.0, "bandwidth": 1e10}
    (plan.parent / "machine.toml").write_text(tomli_w.dumps(small_machine(links=links)), "utf-8")
    machine = ("--machine", plan.parent / "machine.toml")
    one_host, two_hosts = (("--nodes", "1", "--per-node", "2"), ("--nodes", "2", "--per-node", "1"))
    for command, hosts in ((("estimate",), one_host), (("show", "--timeline"), two_hosts)):
        result = cli(command[0], plan, *command[1:], *machine, *hosts).expect(0)
        step_s = float(re.findall(r"a step takes ([\d.e-]+) s", result.out)[0])
        assert (step_s > 1.0) == (hosts == two_hosts), command


def test_json_has_the_curve_of_a_step(cli: Cli, plan: Path) -> None:
    """States that are offloaded between steps are copied behind the first update, where the peak is."""
    changes = ["offload=[{use='memory.optimizer_states', when='between_steps'}]"]
    (stage,) = json.loads(cli("estimate", plan, "--format", "json", changes=changes).out)["stages"]
    assert max(num_bytes for _, num_bytes in stage["curve"]) == stage["peak"] == sum(stage["alive"].values())
    assert " in the update of the first step" in cli("estimate", plan, changes=changes).out.splitlines()[0]


def test_the_error_of_an_invalid_size_names_units() -> None:
    for text in ("KiB", "-1KiB", "much"):
        with pytest.raises(UsageError, match="KiB") as caught:
            parse_size(text)
        assert caught.value.diagnostics[0].code == "memory-size"


# -- calibrate ---------------------------------------------------------------------------------------------------------


@short_calibration()
def test_a_plan_has_the_seconds_of_the_machine_that_measured_it(cli: Cli, plan: Path, folder: Path) -> None:
    """An existing file is replaced only with `--force`."""
    (folder / "machine.toml").write_text("mine")
    cli("calibrate", "--out", "machine.toml", "--plan", plan).expect(2, "machine-exists")
    assert (folder / "machine.toml").read_text() == "mine"
    result = cli("calibrate", "--out", "machine.toml", "--force", "--plan", plan)
    assert (result.code, result.out) == (0, "")
    machine = load_machine(folder / "machine.toml")
    assert machine.device.kind == "cpu"
    assert result.err.strip().endswith("machine.toml has the device, 3 layers under core.keep with microbatches of 1")
    assert [layer.name for layer in machine.layers] == ["embed", "blocks.0", "head"]
    arguments = "show", plan, "--timeline", "--machine", "machine.toml", "--set", "parallel.dp=1"
    shown = cli(*arguments).expect(0).out
    assert all(words in shown for words in ("a step takes ", "all 3 layers were measured on this machine"))
    with patch("train_cli.local_launch.launch", return_value=Fault((), 0)) as launch:
        cli("calibrate", "--out", "machine.toml", "--force", "--plan", plan, "--ranks", 2).expect(0)
    target, options, num_ranks, _ = launch.call_args.args
    assert (target, options["plan"], num_ranks) == ("sley_estimate.commands:measure_on_rank", str(plan), 2)
    data = json.loads(cli("estimate", plan, "--machine", "machine.toml", "--set", "parallel.dp=1", "--format", "json").out)
    assert data["seconds"]["step"] >= data["seconds"]["stages"][0]["computes"] > 0
    assert [layer["source"] for layer in data["seconds"]["layers"]] == ["measured"] * 3
    assert "all 3 layers were computed from their operators" in cli(*arguments, "--set", "data.sequence=8").out


def test_invalid_arguments_are_refused_before_a_measurement(cli: Cli, folder: Path) -> None:
    cli("calibrate", "--out", "none/machine.toml").expect(2, "machine-folder")
    cli("calibrate", "--out", "machine.toml", "--set", "batch.micro_size=1").expect(2, "calibrate-plan")
    cli("show", "plan.toml", "--machine", "machine.toml").expect(2, "--timeline")
    assert cli("calibrate", "--out", "machine.toml", "--plan", "none.toml").code == 3
    assert not (folder / "machine.toml").exists()

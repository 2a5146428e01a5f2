"""`train-cli run` in one process, on local ranks and under torchrun: its files, output and errors."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from acting_model import FIRST_LINE, doing
from started_program import Cli, Start

from sley_core.plan.load import load_plan
from sley_core.run_folder import read_rows
from sley_core.weight_files.read import WeightFiles
from train_cli.run_folder import check_run_folder

pytestmark = pytest.mark.timeout(180)


def assert_is_complete(folder: Path, plan: Path, *options: str) -> None:
    """Checks that the folder has the resolved plan, a row per step, and the summary of a finished run."""
    expected, actual = load_plan(plan, options[1::2]), load_plan(folder / "plan.toml")
    assert actual.run == expected.run
    assert actual.model == expected.model
    resolved_keys = {"samples_per_epoch"}
    assert actual.data.config.model_dump(exclude=resolved_keys) == expected.data.config.model_dump(exclude=resolved_keys)
    assert [row["step"] for row in read_rows(folder)] == list(range(1, expected.run.steps + 1))
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    assert (summary["outcome"], summary["steps"]) == ("finished", expected.run.steps)


def test_one_rank_runs_in_this_process_and_is_replaced_only_with_overwrite(
    cli: Cli, plan: Path, folder: Path, no_children: None
) -> None:
    run = folder / "runs" / "small"

    def summary() -> Any:
        return json.loads((run / "summary.json").read_text("utf-8"))

    result = cli("run", plan, "--set", "parallel.dp=1").expect(0)
    assert result.out == ""
    sizes, _, _, first, second, closing, *_ = result.err.splitlines()
    assert sizes == "1 rank, 12,336 parameters, 4 steps of 4 samples = 0.097 epochs (256 tokens)"
    assert first.startswith("step 2/4  loss ")
    assert second.startswith("step 4/4  loss ")
    assert closing.startswith("finished: 4 steps in ")
    assert "  weights        runs/small/weights\n" in result.err
    assert set(WeightFiles(run / "weights").names) >= {"embed.tokens.weight", "head.norm.weight"}
    assert_is_complete(run, plan, "--set", "parallel.dp=1")
    assert (summary()["world"], summary()["parameters"], summary()["samples"]) == (1, 12336, 16)
    assert summary()["memory_bytes"]["optimizer_states"] == 2 * 4 * 12336, "Adam's two states"

    before = (run / "metrics.jsonl").read_text("utf-8")
    cli("run", plan, "--set", "parallel.dp=1").expect(3, "plan.toml:4:8: error[run-folder]", "--overwrite")
    assert (run / "metrics.jsonl").read_text("utf-8") == before
    offload = 'offload=[{use="memory.optimizer_states", when="between_steps"}]'
    changes = ("parallel.dp=1", "run.steps=3", "run.final_weights='none'", offload)
    result = cli("run", plan, "--overwrite", changes=changes)
    assert (len(list(read_rows(run))), (run / "weights").exists(), "  weights  " in result.err) == (3, False, False)
    # States are offloaded in each of three steps, and fetched in all but the first, which creates them.
    counts = summary()["counts"]["memory.optimizer_states"]
    size, step = 2 * 4 * 12336, counts["optimizer_states_copied_out"] / 3
    assert size <= step < 1.02 * size  # small states lie together, each at a multiple of 256 bytes
    assert counts["optimizer_states_copied_in"] == 2 * step


CONVNET = """
    import torch
    from torch import nn

    class Pictures:
        def __len__(self):
            return 16

        def __getitem__(self, index):
            return {"input": torch.full((1, 8, 8), index / 16), "labels": torch.tensor(index % 2)}

    def layers():
        return [nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2)]
"""


def test_data_without_tokens_has_samples_per_second(cli: Cli, own_model: Callable[..., Path], folder: Path) -> None:
    plan = own_model(CONVNET, data='[data]\nfactory = "own:Pictures"\n')
    result = cli("run", plan, changes=["parallel.dp=1", "run.peak_tflops=1"]).expect(0, " samples/s  ")
    assert not any(unit in result.err for unit in ("tok/s", "FLOP/s", "MFU")), "the FLOPs of convolutions are not known"
    (row, *_) = read_rows(folder / "runs" / "small")
    summary = json.loads((folder / "runs/small/summary.json").read_text("utf-8"))
    assert (row["samples"], summary["tokens"], summary["tokens_per_s"], summary["mfu"]) == (4, 0, None, None)


LOOPBACK = {"0100007F", "0" * 24 + "01000000"}
"""127.0.0.1 and ::1 as /proc/net has them."""


def listening_addresses(pid: int) -> list[str]:
    """Returns the hexadecimal addresses at which process `pid` listens, from /proc."""
    sockets = {str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()}
    tables = [table for name in ("tcp", "tcp6") if (table := Path(f"/proc/{pid}/net/{name}")).exists()]
    rows = [line.split() for table in tables for line in table.read_text("ascii").splitlines()[1:]]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]


def test_two_local_ranks(start: Start, plan: Path, folder: Path, cli: Cli) -> None:
    """They listen only on loopback, the launcher does not listen, and the losses are those of one rank."""
    many = ("--set", "run.steps=24")
    program = start("run", plan, *many)
    program.wait_for("step 2/24")
    ranks = program.ranks()
    assert len(ranks) == 2
    for process in ranks:
        os.kill(process.pid, signal.SIGSTOP)  # so that the run does not end before the checks
    addresses = {address for process in ranks for address in listening_addresses(process.pid)}
    assert addresses, "gloo listens"
    assert addresses <= LOOPBACK
    assert listening_addresses(program.process.pid) == []
    second = cli("run", plan, "--overwrite")
    assert (second.code, second.err.count("is used by an active run")) == (3, 1), second.err
    for process in ranks:
        os.kill(process.pid, signal.SIGCONT)
    result = program.finish().expect(0)
    assert (result.out, result.err.count("finished: 24 steps")) == ("", 1)
    expected = ("2 ranks, ", "rank 0 has ", "memory below ", "step ", "finished: ", "  ")
    assert [line for line in result.err.splitlines() if not line.startswith(expected)] == []
    assert_is_complete(folder / "runs" / "small", plan, *many)
    one_rank = ("--set", "run.steps=3", "--set", "parallel.dp=1", "--set", 'run.name="alone"')
    assert cli("run", plan, *one_rank).code == 0
    for actual, expected in zip(read_rows(folder / "runs" / "small"), read_rows(folder / "runs" / "alone"), strict=False):
        assert actual["loss"] == pytest.approx(expected["loss"], rel=1e-6)


MAX_MODULES = 125
OTHER_PACKAGES = ("sley_cma", "sley_doctor")
"""Installed packages that every run uses, although the plan does not name them."""

WRITES_MODULES = """\
import json, os, sys
from train_cli.main import main
from sley_trainer.stepper import Stepper

step = Stepper.step

def step_and_write(*args, **options):
    result = step(*args, **options)
    names = [name for name in sys.modules if name.startswith(("sley_", "train_cli", "torch._dynamo", "sympy"))]
    with open("modules.json", "w") as file:
        json.dump(sorted(names), file)
    return result

Stepper.step = step_and_write
sys.exit(main(sys.argv[1:]))
"""


def test_a_rank_imports_few_modules_and_trains_if_nobody_reads_its_output(plan: Path, folder: Path) -> None:
    """A process of a launcher trains `models.llama` with `dp.bucketed`. The message lists the imported modules."""
    plan.write_text(plan.read_text("utf-8") + '[[gradient_handlers]]\nuse = "dp.bucketed"\n', "utf-8")
    (folder / "program.py").write_text(WRITES_MODULES, "utf-8")
    options = ("--set", "parallel.dp=1", "--set", "run.steps=10", "--set", "run.log_every=1")
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    program = f"{sys.executable} program.py run plan.toml {' '.join(options)}"
    command = ["bash", "-o", "pipefail", "-c", f"{program} 2>&1 | head -n 1"]
    result = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result
    assert_is_complete(folder / "runs" / "small", plan, *options)
    names = json.loads((folder / "modules.json").read_text("utf-8"))
    own_names = [name for name in names if name.partition(".")[0] not in OTHER_PACKAGES]
    assert not [name for name in names if name.startswith(("torch", "sympy"))]
    assert len(own_names) <= MAX_MODULES, own_names


def test_an_invalid_plan_under_torchrun_is_one_error(start: Start, plan: Path, folder: Path) -> None:
    plan.write_text(plan.read_text("utf-8").replace("steps = 4", "steps = true"), "utf-8")
    result = start("run", "plan.toml", torchrun=()).finish()
    assert result.code != 0
    # torchrun shows it once more, as the report of the first rank that failed.
    errors = [line for line in result.err.splitlines() if line.startswith("plan.toml:5:9: error[wrong-type]: `run.steps`")]
    assert len(errors) == 1
    assert not (folder / "runs").exists()


def test_an_error_of_one_rank_is_printed_once_with_its_place(
    start: Start, own_model: Callable[[str], Path], folder: Path
) -> None:
    action = "if rank == 1: print('to stdout', flush=True); raise ValueError('no good')"
    result = start("run", own_model(doing(action)), "--traceback").finish().expect(1)
    assert result.out == "to stdout\n", "the output of ranks is not changed"
    *trace, last = result.err.splitlines()
    assert last.startswith(f"{folder / 'own.py'}:{FIRST_LINE}:")
    assert "error[own-code]: rank 1 of 2: ValueError: no good" in last
    trace = [line for line in trace if not line.startswith(("2 ranks, ", "rank 0 has ", "memory below "))]
    assert trace[0] == "Traceback (most recent call last):"
    assert sum(line.startswith("Traceback") for line in trace) == 1
    files = {path.name for path in (folder / "runs" / "small").iterdir()}
    assert files == {"plan.toml", "start.json", "attempt.json", "metrics.jsonl", "faults"}, "it took no step"
    check_run_folder(load_plan(folder / "plan.toml"), overwrite=False)  # the next run may use it

"""Runs: alone, on local ranks, under torchrun; what they write, and what they say when something goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from acting_model import FIRST_LINE, doing
from started_program import TORCHRUN

from sley_core.metrics.jsonl import rows
from sley_core.plan.load import load_plan
from sley_testing.processes import listening_sockets
from train_cli.run_folder import check_run_folder

pytestmark = pytest.mark.timeout(180)

Cli = Callable[..., Any]
Start = Callable[..., Any]


def assert_is_complete(folder: Path, plan: Path, *options: str) -> None:
    """plan.toml as resolved, a row per step, and a summary of a run that finished."""
    asked = load_plan(plan, options[1::2])
    written = load_plan(folder / "plan.toml")
    assert written.run == asked.run
    assert written.model == asked.model
    assert written.data.config.model_dump(exclude={"samples_per_epoch"}) == asked.data.config.model_dump(
        exclude={"samples_per_epoch"}
    )
    assert [row["step"] for row in rows(folder)] == list(range(1, asked.run.steps + 1))
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    assert (summary["outcome"], summary["steps"]) == ("finished", asked.run.steps)


def test_one_rank_runs_in_this_process(cli: Cli, plan: Path, folder: Path, no_children: None) -> None:
    result = cli("run", plan, "--set", "parallel.dp=1")
    assert result.code == 0, result.err
    assert result.out == ""
    sizes, _, _, first, second, closing, *_ = result.err.splitlines()
    assert sizes == "1 rank, 12,336 parameters, 4 steps of 4 samples = 0.097 epochs (256 tokens)"
    assert first.startswith("step 2/4  loss ")
    assert second.startswith("step 4/4  loss ")
    assert closing.startswith("finished: 4 steps in ")
    assert_is_complete(folder / "runs" / "small", plan, "--set", "parallel.dp=1")
    summary = json.loads((folder / "runs" / "small" / "summary.json").read_text("utf-8"))
    assert (summary["world"], summary["parameters"], summary["samples"]) == (1, 12336, 16)
    assert summary["memory_bytes"]["optimizer_states"] == 2 * 4 * 12336, "Adam's two states"


CONVNET = """
    import torch
    from torch import nn

    class Pictures:
        def __len__(self):
            return 16

        def __getitem__(self, index):
            return {"image": torch.full((1, 8, 8), index / 16), "labels": torch.tensor(index % 2)}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2))

        def forward(self, image):
            return self.layers(image)

    def layers():
        return [("net", Net())]
"""


def test_a_convnet_on_pictures_has_samples_per_second(cli: Cli, own_model: Callable[..., Path], folder: Path) -> None:
    plan = own_model(CONVNET, data='[data]\nfactory = "own:Pictures"\n')
    result = cli("run", plan, changes=["parallel.dp=1", "run.peak_tflops=1"])
    assert result.code == 0, result.err
    assert " samples/s  " in result.err
    assert not any(unit in result.err for unit in ("tok/s", "FLOP/s", "MFU")), "how often its kernels are applied is not known"
    (row, *_), summary = rows(folder / "runs" / "small"), json.loads((folder / "runs/small/summary.json").read_text("utf-8"))
    assert (row["samples"], summary["tokens"], summary["tokens_per_s"], summary["mfu"]) == (4, 0, None, None)


def test_a_run_is_not_overwritten_unasked(cli: Cli, plan: Path, folder: Path) -> None:
    once = ("run", plan, "--set", "parallel.dp=1", "--set", "run.steps=1")
    assert cli(*once).code == 0
    before = (folder / "runs" / "small" / "metrics.jsonl").read_text("utf-8")
    result = cli(*once)
    assert result.code == 3
    assert "plan.toml:4:8: error[run-folder]" in result.err
    assert "--overwrite" in result.err
    assert (folder / "runs" / "small" / "metrics.jsonl").read_text("utf-8") == before
    assert cli(*once, "--overwrite").code == 0
    assert len(list(rows(folder / "runs" / "small"))) == 1


@pytest.mark.parametrize(
    "fresh", [False, pytest.param(True, marks=pytest.mark.campaign)], ids=["forked", "as a user's shell starts them"]
)
def test_two_local_ranks(start: Start, plan: Path, folder: Path, cli: Cli, fresh: bool) -> None:
    """They listen on loopback alone, the launcher on nothing, and their numbers are those of one rank."""
    many = ("--set", "run.steps=40")
    program = start("run", plan, *many, fresh=fresh)
    program.wait_for("step 2/40")
    ranks = program.ranks()
    assert len(ranks) == 2
    for process in ranks:
        os.kill(process.pid, signal.SIGSTOP)  # or the run may have ended before all has been looked at
    listening = [each for process in ranks for each in listening_sockets(process.pid)]
    assert listening, "gloo listens"
    assert all(each.is_loopback for each in listening), [str(each) for each in listening]
    assert listening_sockets(program.process.pid) == []
    second = cli("run", plan, "--overwrite")
    assert (second.code, second.err.count("is used by an active run")) == (3, 1), second.err
    for process in ranks:
        os.kill(process.pid, signal.SIGCONT)
    result = program.finish()
    assert result.code == 0, result.err
    assert (result.out, result.err.count("finished: 40 steps")) == ("", 1)
    expected = ("2 ranks, ", "rank 0 has ", "memory below ", "step ", "finished: ", "  ")
    assert [line for line in result.err.splitlines() if not line.startswith(expected)] == []
    assert_is_complete(folder / "runs" / "small", plan, *many)
    alone = ("--set", "run.steps=3", "--set", "parallel.dp=1", "--set", 'run.name="alone"')
    assert cli("run", plan, *alone).code == 0
    for two, one in zip(rows(folder / "runs" / "small"), rows(folder / "runs" / "alone"), strict=False):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)


MOST = 210
NOT_OF_THE_PLAN = ("sley_cma", "sley_doctor")
"""Packages that are used because they are installed, not because the plan names them."""

COUNTS_MODULES = """\
import json, os, sys
from train_cli.main import main
from sley_core.engine.stepper import Stepper

step = Stepper.step

def counted(*args, **named):
    found = step(*args, **named)
    names = [name for name in sys.modules if name.partition(".")[0].startswith(("sley_", "train_cli"))]
    with open(f"modules-{os.environ['RANK']}.json", "w") as file:
        json.dump(sorted(names), file)
    return found

Stepper.step = counted
sys.exit(main(sys.argv[1:]))
"""


def test_under_torchrun_a_rank_imports_few_modules(plan: Path, folder: Path) -> None:
    """Two ranks of `dp.bucketed` with `models.llama`, text and AdamW; the message lists the imported modules."""
    plan.write_text(plan.read_text("utf-8") + '[[gradient_handlers]]\nuse = "dp.bucketed"\n', "utf-8")
    (folder / "program.py").write_text(COUNTS_MODULES, "utf-8")
    command = [*TORCHRUN, "program.py", "run", "plan.toml"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("finished: 4 steps") == 1
    assert_is_complete(folder / "runs" / "small", plan)
    for rank in range(2):
        names = json.loads((folder / f"modules-{rank}.json").read_text("utf-8"))
        counted = [name for name in names if name.partition(".")[0] not in NOT_OF_THE_PLAN]
        assert len(counted) <= MOST, counted


def test_a_bad_plan_under_torchrun_is_told_once(start: Start, plan: Path, folder: Path) -> None:
    plan.write_text(plan.read_text("utf-8").replace("steps = 4", "steps = true"), "utf-8")
    result = start("run", "plan.toml", torchrun=()).finish()
    assert result.code != 0
    # Once by us; torchrun then shows what its first failing rank left for it.
    told = [line for line in result.err.splitlines() if line.startswith("plan.toml:5:9: error[wrong-type]: `run.steps`")]
    assert len(told) == 1
    assert not (folder / "runs").exists()


def test_what_one_rank_raises_is_told_once_with_its_place(start: Start, own_model: Callable[[str], Path], folder: Path) -> None:
    action = "if rank == 1: print('to stdout', flush=True); raise ValueError('no good')"
    result = start("run", own_model(doing(action)), "--traceback").finish()
    assert result.code == 1
    assert result.out == "to stdout\n", "what a rank prints passes through plainly"
    *trace, last = result.err.splitlines()
    assert last.startswith(f"{folder / 'own.py'}:{FIRST_LINE}:")
    assert "error[own-code]: rank 1 of 2: ValueError: no good" in last
    trace = [line for line in trace if not line.startswith(("2 ranks, ", "rank 0 has ", "memory below "))]
    assert trace[0] == "Traceback (most recent call last):"
    assert sum(line.startswith("Traceback") for line in trace) == 1
    left = {path.name for path in (folder / "runs" / "small").iterdir()}
    assert left == {"plan.toml", "start.json", "attempt.json", "metrics.jsonl", "faults"}, "it took no step"
    check_run_folder(load_plan(folder / "plan.toml"), overwrite=False)  # the next run may take it

"""How a run ends when somebody ends it: Ctrl-C, SIGTERM, a terminal closed, the launcher killed; no process is ever left."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from acting_model import doing

from sley_core.metrics.jsonl import rows
from sley_core.weight_files.read import WeightFiles
from sley_testing.processes import descendants

pytestmark = pytest.mark.timeout(180)

Start = Callable[..., Any]
Own = Callable[[str], Path]

LONG = ("--set", "run.steps=1000000", "--set", "run.log_every=1")


def summary(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "runs" / "small" / "summary.json").read_text("utf-8"))
    return content


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("dp", "number", "code"),
    [(1, signal.SIGTERM, 143), (2, signal.SIGINT, 130), (1, signal.SIGHUP, 129), (2, signal.SIGHUP, 129)],
)
def test_the_step_is_finished(start: Start, cli: Any, plan: Path, folder: Path, dp: int, number: int, code: int) -> None:
    program = start("run", plan, *LONG, "--set", f"parallel.dp={dp}")
    program.wait_for("step 3/")
    os.kill(program.process.pid, number)
    result = program.finish(40)
    assert result.code == code, result.err
    assert result.err.count("stopping after this step") == 1
    assert "interrupted: " in result.err
    assert "error" not in result.err
    steps = summary(folder)["steps"]
    assert summary(folder)["outcome"] == "interrupted"
    assert "  weights        runs/small/weights\n" in result.err
    assert "head.norm.weight" in WeightFiles(folder / "runs" / "small" / "weights").names
    assert [row["step"] for row in rows(folder / "runs" / "small")] == list(range(1, steps + 1))
    exported = cli("export", "runs/small", "--format", "huggingface", "--out", folder / "out")
    assert f"the weights of step {steps} in" in exported.err
    assert "transformers computes the run's logits" in exported.err


@pytest.mark.campaign  # test_stopping.py has the same of a process without torch
def test_under_nohup_a_closed_terminal_ends_no_rank(start: Start, plan: Path, folder: Path) -> None:
    """Which tells the launcher and its ranks alike."""
    program = start("run", plan, *LONG, launcher=("nohup", sys.executable))
    program.wait_for("step 3/")
    ranks = [rank.pid for rank in program.ranks()]
    assert len(ranks) == 2
    for pid in (program.process.pid, *ranks):
        os.kill(pid, signal.SIGHUP)
    last = int(re.findall(r"step (\d+)/", program.err)[-1])
    program.wait_for(f"step {last + 5}/")
    assert [rank.pid for rank in program.ranks()] == ranks
    os.kill(program.process.pid, signal.SIGTERM)
    assert program.finish(40).code == 143
    assert summary(folder)["outcome"] == "interrupted"


def test_the_second_interrupt_ends_at_once(start: Start, own_model: Own) -> None:
    program = start("run", own_model(doing("os.write(2, b'in a step\\n'); time.sleep(3600)")))
    program.wait_for("in a step")
    os.kill(program.process.pid, signal.SIGINT)
    program.wait_for("stopping after this step")
    os.kill(program.process.pid, signal.SIGINT)
    assert program.finish(30).code == 130, "the step itself takes an hour"


def test_a_killed_launcher_leaves_nothing(start: Start, plan: Path) -> None:
    program = start("run", plan, *LONG)
    program.wait_for("step 3/")
    os.kill(program.process.pid, signal.SIGKILL)
    # `finish` fails if a process is left.
    assert program.finish(40).code == -signal.SIGKILL


def test_a_rank_that_is_ended_in_a_factory_does_not_tell_that_the_factory_failed(start: Start, own_model: Own) -> None:
    wait = r"""
    if "RANK" in os.environ:
        os.write(2, b"in the factory\n")
        time.sleep(3600)"""
    program = start("run", own_model(doing("pass").replace("def layers():", f"def layers():{wait}")))
    program.wait_for("in the factory")
    os.kill(program.process.pid, signal.SIGTERM)
    result = program.finish(40)
    assert result.code == 143
    assert "error[" not in result.err


STARTS_WORKERS = """
    if self.calls == 1:
        def wait():
            print("a worker waits", file=sys.stderr, flush=True)
            time.sleep(3600)
        self.samples = iter(DataLoader(range(1 << 30), num_workers=1))
        multiprocessing.get_context("fork").Process(target=wait, daemon=True).start()
    next(self.samples)
"""
"""A loader's worker, which ends when its parent is gone, and a plain one, which waits for whoever ends it."""


@pytest.mark.campaign  # test_stopping.py has the same of a process without torch
def test_workers_end_with_a_terminated_run(start: Start, own_model: Own, folder: Path) -> None:
    """The run is started fresh: what a process forks is found by the environment that its program was started with."""
    imports = "import multiprocessing, sys\nfrom torch.utils.data import DataLoader\n"
    program = start("run", own_model(imports + doing(STARTS_WORKERS)), *LONG, fresh=True)
    program.wait_for("a worker waits")
    program.wait_for("step 3/")
    assert len(descendants(program.process.pid)) >= 4, "a loader's worker and a plain one on each rank"
    os.kill(program.process.pid, signal.SIGTERM)
    result = program.finish(40)  # which fails if a process is left
    assert result.code == 143, result.err
    assert "error" not in result.err
    assert summary(folder)["outcome"] == "interrupted"

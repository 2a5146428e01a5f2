"""How a run ends when somebody ends it: Ctrl-C, SIGTERM, a rank killed, the launcher killed; no process is ever left."""

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

from sley_core.weight_files.read import WeightFiles

pytestmark = pytest.mark.timeout(180)

Start = Callable[..., Any]

OWN = Path(__file__).parent / "own"
LONG = ("--set", "run.steps=1000000", "--set", "run.log_every=1")

SLOW = """
    import time
    from torch import nn

    class Slow(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(256, 256)

        def forward(self, tokens):
            if self.training:
                print("in a step", flush=True, file=__import__("sys").stderr)
                time.sleep(3600)
            return self.embed(tokens)

    def layers():
        return [Slow()]
"""


def summary(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "runs" / "small" / "summary.json").read_text("utf-8"))
    return content


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("dp", "number", "code"),
    [(1, signal.SIGTERM, 143), (2, signal.SIGINT, 130), (1, signal.SIGHUP, 129), (2, signal.SIGHUP, 129)],
)
def test_the_step_is_finished(start: Start, plan: Path, folder: Path, dp: int, number: int, code: int) -> None:
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
    lines = (folder / "runs" / "small" / "metrics.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, steps + 1))


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param((sys.executable, "-m", "without_hangups"), id="as nohup starts it"),
        pytest.param(("nohup", sys.executable), id="nohup", marks=pytest.mark.campaign),
    ],
)
def test_under_nohup_a_closed_terminal_ends_no_rank(start: Start, plan: Path, folder: Path, launcher: tuple[str, ...]) -> None:
    """Which tells the launcher and its ranks alike."""
    program = start("run", plan, *LONG, launcher=launcher, PYTHONPATH=str(OWN))
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


def test_the_second_interrupt_ends_at_once(start: Start, own_model: Callable[[str], Path]) -> None:
    program = start("run", own_model(SLOW))
    program.wait_for("in a step")
    os.kill(program.process.pid, signal.SIGINT)
    program.wait_for("stopping after this step")
    os.kill(program.process.pid, signal.SIGINT)
    assert program.finish(30).code == 130, "the step itself takes an hour"


@pytest.mark.sample(1)
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_ends_the_run_and_is_named(start: Start, plan: Path, folder: Path, killed: int) -> None:
    program = start("run", plan, *LONG)
    program.wait_for("step 3/")
    os.kill(program.ranks()[killed].pid, signal.SIGKILL)
    result = program.finish(40)
    assert result.code == 1
    errors = [line for line in result.err.splitlines() if "error[" in line]
    assert len(errors) == 1, result.err
    assert f"error[rank-died]: rank {killed} of 2 was killed by SIGKILL" in errors[0]
    assert (folder / "runs" / "small" / "summary.json").exists() == (killed != 0), "rank 0 writes it"


def test_a_killed_launcher_leaves_nothing(start: Start, plan: Path) -> None:
    program = start("run", plan, *LONG)
    program.wait_for("step 3/")
    os.kill(program.process.pid, signal.SIGKILL)
    # `finish` fails if a process is left.
    assert program.finish(40).code == -signal.SIGKILL


def test_a_rank_that_is_ended_in_a_factory_does_not_tell_that_the_factory_failed(
    start: Start, own_model: Callable[[str], Path]
) -> None:
    source = """
        import os, sys, time
        from torch import nn

        class Embed(nn.Embedding):
            def forward(self, tokens):
                return super().forward(tokens)

        def layers():
            if "RANK" in os.environ:
                print("in the factory", flush=True, file=sys.stderr)
                time.sleep(3600)
            return [Embed(256, 256)]
    """
    program = start("run", own_model(source))
    program.wait_for("in the factory")
    os.kill(program.process.pid, signal.SIGTERM)
    result = program.finish(40)
    assert result.code == 143
    assert "error[" not in result.err

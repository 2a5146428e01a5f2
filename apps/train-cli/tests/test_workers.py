"""SIGTERM to a run whose ranks have worker processes, as data loaders start them: all are gone with it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sley_testing.processes import descendants

pytestmark = pytest.mark.timeout(180)

Start = Callable[..., Any]
Own = Callable[[str], Path]

READS = """
    import multiprocessing, sys, time
    from torch import nn
    from torch.utils.data import DataLoader

    def wait():
        print("a worker waits", file=sys.stderr, flush=True)
        time.sleep(3600)

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(256, 256)
            self.samples = None

        def forward(self, tokens):
            if self.training and self.samples is None:
                self.samples = iter(DataLoader(range(1 << 30), num_workers=1))
                multiprocessing.get_context("fork").Process(target=wait, daemon=True).start()
            if self.training:
                next(self.samples)
                {action}
            return self.embed(tokens)

    def layers():
        return [Reads()]
"""
"""A loader's worker, which ends when its parent is gone, and a plain one, which waits for whoever ends it.

Runs are started fresh: what a process forks is found by the environment that its program was started with.
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("dp", [1, 2])
def test_workers_end_with_a_terminated_run(start: Start, own_model: Own, folder: Path, dp: int) -> None:
    sets = ("--set", "run.steps=1000000", "--set", "run.log_every=1", "--set", f"parallel.dp={dp}")
    program = start("run", own_model(READS.format(action="pass")), *sets, fresh=True)
    program.wait_for("a worker waits")
    program.wait_for("step 3/")
    assert len(descendants(program.process.pid)) >= 2 * dp, "a loader's worker and a plain one on each rank"
    os.kill(program.process.pid, signal.SIGTERM)
    result = program.finish(40)  # which fails if a process is left
    assert result.code == 143, result.err
    assert "error" not in result.err
    summary = json.loads((folder / "runs" / "small" / "summary.json").read_text("utf-8"))
    assert summary["outcome"] == "interrupted"


@pytest.mark.campaign  # test_stopping.py has the same of a process without torch
@pytest.mark.parametrize("dp", [1, 2])
def test_workers_end_with_a_run_that_is_terminated_in_a_step_that_never_ends(start: Start, own_model: Own, dp: int) -> None:
    action = 'print("in a step", file=sys.stderr, flush=True); time.sleep(3600)'
    program = start("run", own_model(READS.format(action=action)), "--set", f"parallel.dp={dp}", fresh=True)
    program.wait_for("a worker waits")
    program.wait_for("in a step")
    os.kill(program.process.pid, signal.SIGTERM)
    assert program.finish(40).code == 143

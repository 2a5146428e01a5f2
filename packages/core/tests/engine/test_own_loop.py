"""The example of a loop of one's own: the same losses alone and on ranks that have a launcher's environment."""

from __future__ import annotations

import math
import os
import re
import runpy
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[4] / "examples" / "own_loop.py"
CHANGES = ['run.device="cpu"', "model.num_layers=1", "model.hidden=64", "optimizer.lr=0.02"]


def main(cwd):
    os.chdir(cwd)
    sys.argv = [str(PROGRAM), *CHANGES]
    runpy.run_path(str(PROGRAM), run_name="__main__")


def test_alone_and_on_two_ranks_the_losses_are_the_same(ranks, tmp_path, capsys):
    losses = []
    for size in (1, 2):
        ranks(size, 100, init=False)(main, tmp_path)
        lines = [line for line in capsys.readouterr().out.splitlines() if "loss" in line]
        found = [re.fullmatch(r"\[rank 0\] step +(\d+)  loss (\d+\.\d{6})", line) for line in lines]
        assert [int(line[1]) for line in found] == list(range(1, 21)), lines
        losses.append([float(line[2]) for line in found])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][0] == pytest.approx(math.log(256), abs=0.2)
    assert losses[0][-1] < 2
    assert list(tmp_path.iterdir()) == [], "a loop of one's own writes nothing"

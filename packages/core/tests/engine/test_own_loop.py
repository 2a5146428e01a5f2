"""The example of a loop of one's own: alone and under torchrun, with the same losses, on the loopback interface alone."""

from __future__ import annotations

import math
import os
import re
import runpy
import sys
from pathlib import Path

import pytest

from sley_testing.forked import ForkedProgram

PROGRAM = Path(__file__).parents[4] / "examples" / "own_loop.py"
CHANGES = ['run.device="cpu"', "model.num_layers=1", "model.hidden=64", "optimizer.lr=0.02"]
TORCHRUN = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]

NOT_OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLEY_STORE")


def losses(out):
    lines = [re.fullmatch(r"step +(\d+)  loss (\d+\.\d{6})", line) for line in out.splitlines()]
    assert [int(line[1]) for line in lines] == list(range(1, 21)), out
    return [float(line[2]) for line in lines]


def alone(cwd):
    for name in NOT_OURS:
        os.environ.pop(name, None)
    os.chdir(cwd)
    sys.argv = [str(PROGRAM), *CHANGES]
    runpy.run_path(str(PROGRAM), run_name="__main__")


def under_torchrun(cwd):
    """Returns the output of the program, whose ranks are forked."""
    environ = {name: value for name, value in os.environ.items() if name not in NOT_OURS}
    environ |= {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo", "OMP_NUM_THREADS": "1"}
    environ |= {"PYTHONPATH": str(PROGRAM.parent)}
    done = ForkedProgram("torch.distributed.run", [*TORCHRUN, "-m", PROGRAM.stem, *CHANGES], cwd=cwd, env=environ)
    with done.stdout as out, done.stderr as err:
        printed, said = out.read(), err.read()
    assert done.wait(100) == 0, said
    return printed


def test_alone_and_under_torchrun_the_losses_are_the_same(ranks, tmp_path, capsys, no_children):
    ranks(1, 100, init=False)(alone, tmp_path)
    of_one = losses(capsys.readouterr().out.replace("[rank 0] ", ""))
    assert of_one[0] == pytest.approx(math.log(256), abs=0.2)
    assert of_one[-1] < 2
    assert losses(under_torchrun(tmp_path)) == pytest.approx(of_one, rel=1e-4)
    assert list(tmp_path.iterdir()) == [], "a loop of one's own writes nothing"

"""Trains plans for three steps on their ranks: `python train_plans.py FOLDER PLAN...`; runs are written to FOLDER.

Ranks are forked from one process that has imported torch, which fresh ones of a dozen plans would do thirty times. What
`train-cli run` does before it starts ranks is done by `train-cli check --model`.
"""

import sys
from pathlib import Path

from sley_core.plan.load import load_plan
from sley_testing.ranks import Ranks
from train_cli.main import main


def train(plan: Path, folder: Path) -> None:
    """Checks and trains `plan`; fails where an exit code is not 0."""
    assert main(["check", "--model", str(plan)]) == 0, plan
    changes = ("--set", "run.steps=3", "--set", f'run.folder="{folder.as_posix()}"')
    size = load_plan(plan).world_size(None)
    codes = Ranks(size, 300, init=False)(main, ["run", str(plan), "--overwrite", *changes])
    assert codes == [0] * size, f"{plan}: exit codes {codes}"


if __name__ == "__main__":
    for name in sys.argv[2:]:
        train(Path(name), Path(sys.argv[1]))

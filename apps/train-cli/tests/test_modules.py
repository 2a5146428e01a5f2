"""How many of Sley's modules a rank has imported at the end of its first step."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from started_program import TORCHRUN

MOST = 210
NOT_OF_THE_PLAN = ("sley_cma", "sley_doctor")
"""Packages that are used because they are installed, not because the plan names them."""

PROGRAM = """\
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


def test_a_rank_imports_few_modules(plan: Path, folder: Path) -> None:
    """Two ranks of `dp.bucketed` with `models.llama`, text and AdamW; the message lists the imported modules."""
    plan.write_text(plan.read_text("utf-8") + '[[gradient_handlers]]\nuse = "dp.bucketed"\n', "utf-8")
    (folder / "program.py").write_text(PROGRAM, "utf-8")
    command = [*TORCHRUN, "program.py", "run", "plan.toml", "--set", "run.steps=1"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        names = json.loads((folder / f"modules-{rank}.json").read_text("utf-8"))
        counted = [name for name in names if name.partition(".")[0] not in NOT_OF_THE_PLAN]
        assert len(counted) <= MOST, counted

"""The scripts of examples/launch start ranks: stubs of SLURM's programs run one. `--nodes` and `--per-node` set the world."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from started_program import Result

Cli = Callable[..., Result]
EXAMPLES = Path(__file__).parents[3] / "examples" / "launch"

NOTE = """#!/bin/bash
env | grep -E '^(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|OMP_NUM_THREADS)=' | sort > "$NOTES/$RANK"
echo "args=$*" >> "$NOTES/$RANK"
"""
"""A stub of train-cli, which writes its variables and arguments into a file."""

SRUN = """#!/bin/bash
while [ "${1#--}" != "$1" ]; do shift; done
for task in $(seq 0 $((TASKS - 1))); do
  SLURM_PROCID=$task SLURM_LOCALID=$((task % PER_NODE)) SLURM_NTASKS=$TASKS SLURM_STEP_NUM_TASKS=$TASKS "$@" &
done
failed=0; for task in $(jobs -p); do wait "$task" || failed=1; done; exit $failed
"""
"""A stub of srun, which starts all tasks on this machine with SLURM's variables."""


@pytest.fixture
def stubs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts the stubs first on PATH. They write into the folder `notes`."""
    programs = {"srun": SRUN, "train-cli": NOTE, "scontrol": "#!/bin/bash\necho localhost\n"}
    (folder / "bin").mkdir()
    (folder / "notes").mkdir()
    for name, text in programs.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("NOTES", str(folder / "notes"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return folder


def run_program(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    process = subprocess.run(command, timeout=120, capture_output=True, text=True, check=False, env={**os.environ, **environ})
    assert process.returncode == 0, process.stderr
    return process


def read_notes(folder: Path, rank: int) -> dict[str, str]:
    lines = (folder / "notes" / str(rank)).read_text().splitlines()
    return dict(line.partition("=")[::2] for line in lines)


@pytest.mark.skipif(not EXAMPLES.exists(), reason="an sdist has no examples")
def test_slurm_gives_each_task_its_rank(stubs: Path) -> None:
    environ = {"SLURM_JOB_NODELIST": "a[0-1]", "SLURM_JOB_ID": "20007", "SLURM_CPUS_PER_TASK": "3"}
    environ |= {"SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "TASKS": "4", "PER_NODE": "2"}
    run_program("bash", str(EXAMPLES / "slurm.sbatch"), "plan.toml", "--resume", "auto", **environ)
    for rank in range(4):
        notes = read_notes(stubs, rank)
        assert (notes["RANK"], notes["LOCAL_RANK"]) == (str(rank), str(rank % 2))
        assert (notes["WORLD_SIZE"], notes["LOCAL_WORLD_SIZE"], notes["OMP_NUM_THREADS"]) == ("4", "2", "3")
        assert (notes["MASTER_ADDR"], notes["MASTER_PORT"]) == ("localhost", "20007")
        assert notes["args"] == "run plan.toml --resume auto"


@pytest.mark.parametrize("command", ["check", "show"])
def test_nodes_and_per_node_set_the_world(cli: Cli, plan: Path, command: str) -> None:
    auto = ('parallel.dp="auto"', "batch.global_size=12", "batch.micro_size=1")
    assert cli(command, plan, "--nodes", 3, "--per-node", 2, changes=auto).code == 0
    assert "batch-does-not-divide" in cli(command, plan, "--world", 5, changes=auto).err or command == "show"
    wrong = cli(command, plan, "--nodes", 3, "--per-node", 2)
    assert (wrong.code, "must be pp x dp x sp = 1 x 2 x 1, but is 6" in wrong.err) == (3, True)
    assert "pass both" in cli(command, plan, "--nodes", 3).err
    assert "remove one of them" in cli(command, plan, "--nodes", 3, "--per-node", 2, "--world", 6).err

"""What `train-cli launch` prints: it is run here, with engines that are real where they are at hand, and stubs where not."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from started_program import Result

Cli = Callable[..., Result]
EXAMPLES = Path(__file__).parents[3] / "examples" / "launch"

NOTE = """#!/bin/bash
env | grep -E '^(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|OMP_NUM_THREADS)=' | sort > "$NOTES/$RANK"
echo "args=$*" >> "$NOTES/$RANK"
"""
"""Stands for train-cli: writes down how it was started."""

SRUN = """#!/bin/bash
while [ "${1#--}" != "$1" ]; do shift; done
for task in $(seq 0 $((TASKS - 1))); do
  SLURM_PROCID=$task SLURM_LOCALID=$((task % PER_NODE)) SLURM_NTASKS=$TASKS SLURM_STEP_NUM_TASKS=$TASKS "$@" &
done
failed=0; for task in $(jobs -p); do wait "$task" || failed=1; done; exit $failed
"""
"""Stands for srun: starts the tasks on this machine with the variables that SLURM gives them."""


@pytest.fixture
def stubs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs of that name come first on PATH; what they note lies in the folder `notes`."""
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


def executed(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, timeout=120, capture_output=True, text=True, check=False, env={**os.environ, **environ})
    assert done.returncode == 0, done.stderr
    return done


def noted(folder: Path, rank: int) -> dict[str, str]:
    lines = (folder / "notes" / str(rank)).read_text().splitlines()
    return dict(line.partition("=")[::2] for line in lines)


def test_slurm_gives_each_task_its_rank(cli: Cli, plan: Path, stubs: Path) -> None:
    script = cli("launch", plan, "--on", "slurm", "--nodes", 2, "--per-node", 2, changes=["parallel.dp=4"]).out
    assert "#SBATCH --nodes=2" in script
    assert "#SBATCH --ntasks-per-node=2" in script
    assert "--gpus" not in script, "the plan's device is the CPU"
    assert "#SBATCH --no-requeue" in script, "without [checkpoint] it would begin anew"
    (stubs / "job.sh").write_text(script)
    given = {"SLURM_JOB_NODELIST": "a[0-1]", "SLURM_JOB_ID": "20007", "SLURM_CPUS_PER_TASK": "3"}
    executed("bash", "job.sh", TASKS="4", PER_NODE="2", **given)
    for rank in range(4):
        found = noted(stubs, rank)
        assert (found["RANK"], found["LOCAL_RANK"]) == (str(rank), str(rank % 2))
        assert (found["WORLD_SIZE"], found["LOCAL_WORLD_SIZE"], found["OMP_NUM_THREADS"]) == ("4", "2", "3")
        assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("localhost", "20007")
        assert found["args"] == f"run {plan} --set parallel.dp=4"


def test_a_package_adds_an_engine(cli: Cli, plan: Path, install: Callable[..., None]) -> None:
    source = "def script(job):\n    return f'{job.label} {job.nodes} {job.per_node} {job.uses_gpus} {job.arguments}'"
    install("sley-flux", "flux", source, group="sley.launchers", attribute=":script")
    told = cli("launch", plan, "--on", "flux", "--nodes", 2, changes=["run.device=auto"])
    assert told.out == f"small 2 1 True ('run', '{plan}', '--set', 'run.device=auto')"


@pytest.mark.skipif(not EXAMPLES.exists(), reason="an sdist has no examples")
def test_examples_of_other_engines_start_torchrun_on_each_host() -> None:
    """The fields are those of a TrainJob, and of its trainer, in the API trainer.kubeflow.org/v1alpha1."""
    job = yaml.safe_load((EXAMPLES / "trainjob.yaml").read_text("utf-8"))
    assert (job.keys(), job["kind"]) == ({"apiVersion", "kind", "metadata", "spec"}, "TrainJob")
    fields = {"image", "command", "args", "env", "numNodes", "resourcesPerNode", "numProcPerNode"}
    assert job["spec"]["trainer"].keys() <= fields
    assert job["spec"]["trainer"]["command"][:4] == ["torchrun", "-m", "train_cli", "run"]
    compile((EXAMPLES / "ray_job.py").read_text("utf-8"), "ray_job.py", "exec")


@pytest.mark.parametrize(("name", "label"), [("small", "small"), ("My_Run.2", "my-run-2"), ("7b", "sley-7b")])
def test_names_of_jobs_are_such_that_clusters_take_them(cli: Cli, plan: Path, name: str, label: str) -> None:
    told = cli("launch", plan, "--on", "slurm", "--nodes", 1, changes=[f'run.name="{name}"'])
    assert f"#SBATCH --job-name={label}\n" in told.out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--on", "torchrun", "--nodes", "3"), "per-node", "2 ranks cannot be divided evenly among 3 hosts"),
        (("--on", "torchrun", "--nodes", "2", "--per-node", "2"), "layout", "must be pp x dp x sp = 1 x 2 x 1, but is 4"),
        (("--on", "slurm", "--nodes", "2", "--set", 'parallel.dp="auto"'), "per-node", "--per-node N"),
        (("--on", "slrm", "--nodes", "2"), "launch-engine", "did you mean `slurm`?"),
        (("--on", "kubeflow", "--nodes", "2"), "launch-engine", "examples/launch"),
    ],
)
def test_a_world_that_the_plan_does_not_have_is_refused(
    cli: Cli, plan: Path, arguments: tuple[str, ...], code: str, words: str
) -> None:
    told = cli("launch", plan, *arguments)
    assert told.code in (2, 3)
    assert (told.out, f"error[{code}]" in told.err, words in told.err) == ("", True, True), told.err


@pytest.mark.parametrize("command", ["check", "show"])
def test_hosts_and_ranks_of_each_say_the_world(cli: Cli, plan: Path, command: str) -> None:
    auto = ('parallel.dp="auto"', "batch.global_size=12", "batch.micro_size=1")
    assert cli(command, plan, "--nodes", 3, "--per-node", 2, changes=auto).code == 0
    odd = cli(command, plan, "--nodes", 3, "--per-node", 2)
    assert (odd.code, "must be pp x dp x sp = 1 x 2 x 1, but is 6" in odd.err) == (3, True)
    assert "pass both" in cli(command, plan, "--nodes", 3).err
    assert "remove one of them" in cli(command, plan, "--nodes", 3, "--per-node", 2, "--world", 6).err

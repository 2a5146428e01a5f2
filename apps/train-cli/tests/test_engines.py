"""What `train-cli launch` prints: it is run here, with engines that are real where they are at hand, and stubs where not."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from started_program import Result

from sley_core.attempt import WEIGHTS
from sley_core.weight_files.read import WeightFiles

Cli = Callable[..., Result]

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

TORCHRUN = """#!/bin/bash
echo "$@" >> "$NOTES/torchrun"
"""

RAY = """
import os, threading
class _Task:
    def __init__(self, function): self.function = function
    def options(self, **wanted): open(os.environ["NOTES"] + "/wanted", "a").write(repr(wanted) + "\\n"); return self
    def remote(self, *given):
        found = []
        thread = threading.Thread(target=lambda: found.append(self.function(*given)))
        thread.start()
        return thread, found
def remote(**options): return _Task
def init(): pass
def cancel(task, force): pass
def get(task):
    if task is None: return None
    task[0].join(); return task[1][0]
def wait(tasks):
    tasks[0][0].join(); return tasks[:1], tasks[1:]
import ray.util
"""
"""Stands for ray: a task is a thread of the program."""

RAY_UTIL = "def get_node_ip_address(): return '127.0.0.1'"

RAY_GROUP = """
class placement_group:
    def __init__(self, bundles, strategy): print(bundles, strategy)
    def ready(self): return None
"""


@pytest.fixture
def stubs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs of that name come first on PATH; what they note lies in the folder `notes`."""
    programs = {"srun": SRUN, "train-cli": NOTE, "torchrun": TORCHRUN, "scontrol": "#!/bin/bash\necho localhost\n"}
    (folder / "bin").mkdir()
    (folder / "notes").mkdir()
    for name, text in programs.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    modules = {"__init__": RAY, "util/__init__": RAY_UTIL, "util/placement_group": RAY_GROUP}
    modules["util/scheduling_strategies"] = "PlacementGroupSchedulingStrategy = dict\n"
    for module, text in modules.items():
        (folder / "site/ray" / f"{module}.py").parent.mkdir(parents=True, exist_ok=True)
        (folder / "site/ray" / f"{module}.py").write_text(text)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(folder / "site"))
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


def test_ray_starts_torchrun_on_each_host(cli: Cli, plan: Path, stubs: Path) -> None:
    program = cli("launch", plan, "--on", "ray", "--nodes", 2, changes=["run.device=auto"]).out
    (stubs / "job.py").write_text(program)
    assert executed(sys.executable, "job.py").stdout == "[{'CPU': 1, 'GPU': 1}, {'CPU': 1, 'GPU': 1}] STRICT_SPREAD\n"
    first, second = sorted((stubs / "notes/torchrun").read_text().splitlines())
    assert "--nnodes 2 --nproc-per-node 1 --node-rank 0 --master-addr 127.0.0.1 --master-port" in first
    assert second == first.replace("--node-rank 0", "--node-rank 1")
    assert f"-m train_cli run {plan} --set run.device=auto" in first
    assert "'num_gpus': 1" in (stubs / "notes/wanted").read_text()


def test_ray_ends_with_the_code_of_the_host_that_failed(cli: Cli, plan: Path, stubs: Path) -> None:
    (stubs / "bin/torchrun").write_text("#!/bin/bash\nexit 7\n")
    (stubs / "job.py").write_text(cli("launch", plan, "--on", "ray", "--nodes", 2).out)
    assert subprocess.run([sys.executable, "job.py"], timeout=60, check=False, capture_output=True).returncode == 7


TRAIN_JOB = {"apiVersion", "kind", "metadata", "spec"}
TRAINER = {"image", "command", "args", "env", "numNodes", "resourcesPerNode", "numProcPerNode"}
"""Fields of a TrainJob, and of its trainer, in the API trainer.kubeflow.org/v1alpha1."""


def test_a_train_job_has_the_fields_of_its_api(cli: Cli, plan: Path) -> None:
    told = cli("launch", plan, "--on", "kubeflow", "--nodes", 2, "--image", "me/sley:1", changes=["run.device=auto"])
    job = yaml.safe_load(told.out)
    assert job.keys() <= TRAIN_JOB
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = job["spec"]["trainer"]
    assert trainer.keys() <= TRAINER
    assert (trainer["numNodes"], trainer["numProcPerNode"], trainer["image"]) == (2, 1, "me/sley:1")
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": "1"}}
    assert trainer["command"][:5] == ["torchrun", "-m", "train_cli", "run", str(plan)]
    assert job["spec"]["runtimeRef"] == {"name": "torch-distributed"}


@pytest.mark.parametrize(("name", "label"), [("small", "small"), ("My_Run.2", "my-run-2"), ("7b", "sley-7b")])
def test_names_of_jobs_are_such_that_clusters_take_them(cli: Cli, plan: Path, name: str, label: str) -> None:
    told = cli("launch", plan, "--on", "slurm", "--nodes", 1, changes=[f'run.name="{name}"'])
    assert f"#SBATCH --job-name={label}\n" in told.out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--on", "torchrun", "--nodes", "3"), "per-node", "2 ranks do not spread evenly over 3 hosts"),
        (("--on", "torchrun", "--nodes", "2", "--per-node", "2"), "layout", "4 != 1 x 2 x 1"),
        (("--on", "slurm", "--nodes", "2", "--set", 'parallel.dp="auto"'), "per-node", "--per-node N"),
        (("--on", "kubeflow", "--nodes", "2"), "image", "--image NAME"),
        (("--on", "slurm", "--nodes", "2", "--image", "x"), "image", "says nothing to slurm"),
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
    assert (odd.code, "6 != 1 x 2 x 1" in odd.err) == (3, True)
    assert "give both" in cli(command, plan, "--nodes", 3).err
    assert "leave one of them out" in cli(command, plan, "--nodes", 3, "--per-node", 2, "--world", 6).err


@pytest.mark.campaign
@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ["torchrun", "slurm", "ray"])
def test_every_engine_gives_the_weights_of_a_local_run(cli: Cli, plan: Path, stubs: Path, engine: str) -> None:
    here = Path(sys.executable).parent
    for name in ("train-cli", "torchrun"):
        (stubs / "bin" / name).unlink()
        (stubs / "bin" / name).write_text(f'#!/bin/bash\nexec {here / "python"} -m {MODULES[name]} "$@"\n')
        (stubs / "bin" / name).chmod(0o755)
    own = ("run.steps=20", "run.name=engine")
    text = cli("launch", plan, "--on", engine, "--nodes", 2, changes=own).out
    (stubs / "job").write_text(text)
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    match engine:
        case "torchrun":
            environ = {**os.environ, "HEAD": socket.gethostname(), "PORT": str(port), "OMP_NUM_THREADS": "1"}
            hosts = [subprocess.Popen(["bash", "job"], env=environ) for _ in range(2)]
            assert [host.wait(200) for host in hosts] == [0, 0]
        case "slurm":
            given = {"SLURM_JOB_NODELIST": "a", "SLURM_JOB_ID": str(port - 20000), "TASKS": "2", "PER_NODE": "1"}
            executed("bash", "job", **given)
        case "ray":
            executed(sys.executable, "job", OMP_NUM_THREADS="1")
    assert cli("run", plan, changes=("run.steps=20", "run.name=local")).code == 0
    local, engines = (WeightFiles(stubs / "runs" / name / WEIGHTS) for name in ("local", "engine"))
    assert list(local.names) == list(engines.names)
    assert all(local.tensor(name).equal(engines.tensor(name)) for name in local.names)
    assert json.loads((stubs / "runs/engine/summary.json").read_text())["world"] == 2


MODULES = {"train-cli": "train_cli", "torchrun": "torch.distributed.run"}

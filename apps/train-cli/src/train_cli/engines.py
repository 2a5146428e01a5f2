"""Starts of a run on several hosts, as text for torchrun, SLURM, the Kubeflow Trainer and Ray."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from sley_core.errors import PlanError, UsageError
from sley_core.plan.check import check_plan
from sley_core.plan.plan import Plan


@dataclass(frozen=True)
class Job:
    """Describes a run to an engine.

    nodes, per_node: hosts, and ranks on each; their product is a world that the plan runs on. arguments: of `train-cli` on
    each rank. uses_gpus: whether each rank wants one. goes_on: whether a run that is started again resumes from a checkpoint.
    """

    name: str
    nodes: int
    per_node: int
    arguments: Sequence[str]
    uses_gpus: bool
    goes_on: bool

    @property
    def world(self) -> int:
        return self.nodes * self.per_node

    @property
    def command(self) -> str:
        """`train-cli` with its arguments, for a shell."""
        return shlex.join(("train-cli", *self.arguments))

    @property
    def label(self) -> str:
        """The name as SLURM and Kubernetes take it: small letters, digits and `-`, at most 50 of them, a letter first."""
        plain = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        return (plain if plain[:1].isalpha() else f"sley-{plain}")[:50].rstrip("-")


def job_of(plan: Plan, nodes: int, per_node: int | None, arguments: Sequence[str]) -> Job:
    """Returns the job of `plan` on `nodes` hosts. per_node: None for what the plan's world gives each.

    Raises PlanError for a world that the plan does not divide into, with all of its problems; UsageError "per-node" where the
    plan leaves the world open, or does not spread evenly.
    """
    if per_node is None:
        if plan.parallel.dp == "auto":
            raise UsageError(
                "per-node",
                "the plan leaves the number of ranks open (`dp` is auto), so nothing says how many a host has",
                hint="add `--per-node N`",
            )
        per_node, left = divmod(plan.world(), nodes)
        if left or not per_node:
            raise UsageError(
                "per-node",
                f"the plan's {plan.world()} ranks do not spread evenly over {nodes} hosts",
                hint="choose another `--nodes` or `dp`, or `--set 'parallel.dp=\"auto\"'` and `--per-node N`",
            )
    if problems := check_plan(plan, nodes * per_node):
        raise PlanError.many(problems)
    goes_on = plan.checkpoint is not None
    return Job(plan.run.name, nodes, per_node, tuple(arguments), plan.run.device != "cpu", goes_on)


PORT = 29500


def torchrun_command(job: Job) -> str:
    """Returns a shell script of one command, to be run on each host; HEAD in its environment names one of them for all. Its
    arguments, such as `--resume auto`, are added to those of the run.
    """
    module = shlex.join(("-m", "train_cli", *job.arguments))
    ranks = f"--nnodes {job.nodes} --nproc-per-node {job.per_node}"
    if job.nodes == 1:
        return f'torchrun --standalone {ranks} {module} "$@"\n'
    return f"""\
# On each of the {job.nodes} hosts, with the same plan, files and versions. HEAD is one of them, by a name that all others know.
torchrun {ranks} --rdzv-id {job.label} --rdzv-backend c10d \\
  --rdzv-endpoint "${{HEAD:?is the host that all others reach}}:${{PORT:-{PORT}}}" \\
  {module} "$@"
"""


def slurm_script(job: Job) -> str:
    """Returns a script for `sbatch`.

    srun gives each task its number in variables with names of its own; the script copies them to the names that Sley and torch
    read. A task that fails ends all others. Where the run saves checkpoints, the job may be requeued, and resumes from the
    newest one.
    """
    options = [f"--job-name={job.label}", f"--nodes={job.nodes}", f"--ntasks-per-node={job.per_node}"]
    options += [f"--gpus-per-node={job.per_node}"] if job.uses_gpus else []
    options += ["--requeue"] if job.goes_on else ["--no-requeue"]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in options),
            "# Of your cluster: --partition, --account, --time; --cpus-per-task for the threads of each rank.",
            "set -euo pipefail",
            'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "export MASTER_ADDR",
            "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))  # two jobs on one host have two ports",
            "export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}",
            f"export WORLD_SIZE={job.world} LOCAL_WORLD_SIZE={job.per_node}",
            "# shellcheck disable=SC2016  # each task fills in its own",
            "srun --kill-on-bad-exit=1 bash -c \\",
            f"  'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec \"$@\"' rank {job.command}",
            "",
        ]
    )


RUNTIME = "torch-distributed"
"""The runtime for torch that the Trainer installs in a cluster: it sets torchrun's options as variables, such as PET_NNODES."""


def kubeflow_manifest(job: Job, image: str) -> str:
    """Returns a manifest for `kubectl create -f -`. image: has Sley's packages, the plan and its files."""
    resources = f'\n    resourcesPerNode:\n      limits:\n        nvidia.com/gpu: "{job.per_node}"' if job.uses_gpus else ""
    command = json.dumps(["torchrun", "-m", "train_cli", *job.arguments])  # JSON is YAML
    return f"""\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: {job.label}
spec:
  runtimeRef:
    name: {RUNTIME}
  trainer:
    image: {json.dumps(image)}
    numNodes: {job.nodes}
    numProcPerNode: {job.per_node}
    command: {command}{resources}
"""


_PROGRAM = '''\
"""Runs on a Ray cluster: ray job submit --working-dir . -- python THIS_FILE"""

import socket
import subprocess

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NODES, PER_NODE = @nodes@, @per_node@
RESOURCES = @resources@  # of each host
ARGUMENTS = @arguments@


@ray.remote(max_retries=0)
def endpoint():
    """The first host's address, and a port that is free there."""
    with socket.socket() as free:
        free.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"


@ray.remote(max_retries=0)
def node(number, address):
    """The ranks of one host, until they have ended."""
    host, _, port = address.rpartition(":")
    ranks = ["--nnodes", NODES, "--nproc-per-node", PER_NODE, "--node-rank", number]
    command = ["torchrun", *ranks, "--master-addr", host, "--master-port", port, "-m", "train_cli", *ARGUMENTS]
    return subprocess.call([str(part) for part in command])


def on(host):
    """Where a task runs: on the host of this number, with all that is kept for it there."""
    place = PlacementGroupSchedulingStrategy(placement_group=hosts, placement_group_bundle_index=host)
    return {"scheduling_strategy": place}


ray.init()
hosts = placement_group([RESOURCES] * NODES, strategy="STRICT_SPREAD")
ray.get(hosts.ready())
address = ray.get(endpoint.options(num_cpus=0, **on(0)).remote())
wanted = {"num_cpus": RESOURCES["CPU"], "num_gpus": RESOURCES.get("GPU", 0)}
waiting = [node.options(**wanted, **on(number)).remote(number, address) for number in range(NODES)]
while waiting:
    done, waiting = ray.wait(waiting)
    if code := ray.get(done[0]):
        for other in waiting:
            ray.cancel(other, force=True)
        raise SystemExit(code)
'''


def ray_program(job: Job) -> str:
    """Returns a Python program. On each host it keeps a CPU, and a GPU where the plan wants one, for each rank."""
    resources = {"CPU": job.per_node} | ({"GPU": job.per_node} if job.uses_gpus else {})
    filled = {"nodes": job.nodes, "per_node": job.per_node, "resources": resources, "arguments": list(job.arguments)}
    text = _PROGRAM
    for name, value in filled.items():
        text = text.replace(f"@{name}@", json.dumps(value))
    return text

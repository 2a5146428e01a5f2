"""`train-cli launch`: prints a command or job script that runs a plan on several hosts, for torchrun or SLURM.

examples/launch has a Kubeflow TrainJob and a program for Ray to start from.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

from sley_core.errors import PlanError, UsageError
from sley_core.plan.check import check_plan
from sley_core.plan.load import load_plan
from sley_core.plan.plan import Plan
from train_cli.options import PlanArgument, SetOption

PORT = 29500


class Launcher(StrEnum):
    """The program that starts the ranks."""

    torchrun = "torchrun"
    slurm = "slurm"


def launch(
    plan: PlanArgument,
    on: Annotated[Launcher, typer.Option("--on", help="The launcher. For others, adapt a file of examples/launch.")],
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", min=1, help="The number of hosts.")],
    per_node: Annotated[
        int | None,
        typer.Option("--per-node", metavar="N", min=1, help="The ranks on each host, if the plan does not set them."),
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Print a command or job script that runs the plan on N hosts."""
    changes = overrides or []
    arguments = ["run", str(plan), *(part for change in changes for part in ("--set", change))]
    job = job_of(load_plan(plan, changes), nodes, per_node, arguments)
    typer.echo(torchrun_command(job) if on is Launcher.torchrun else slurm_script(job), nl=False)


@dataclass(frozen=True)
class Job:
    """Describes a run for a launcher.

    nodes, per_node: the number of hosts, and of ranks on each. arguments: the arguments of `train-cli` on each rank.
    uses_gpus: whether each rank needs a GPU. resumes: whether a restarted run resumes from a checkpoint.
    """

    name: str
    nodes: int
    per_node: int
    arguments: Sequence[str]
    uses_gpus: bool
    resumes: bool

    @property
    def world(self) -> int:
        return self.nodes * self.per_node

    @property
    def label(self) -> str:
        """The name as SLURM and Kubernetes accept it: at most 50 lower-case letters, digits and `-`, a letter first."""
        plain = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        return (plain if plain[:1].isalpha() else f"sley-{plain}")[:50].rstrip("-")


def job_of(plan: Plan, nodes: int, per_node: int | None, arguments: Sequence[str]) -> Job:
    """Returns the job of `plan` on `nodes` hosts. per_node: the number of ranks on each host; None divides the plan's world.

    Raises PlanError with all problems if the plan does not fit the world, and UsageError "per-node" if the plan does not set
    the number of ranks, or it is not a multiple of `nodes`.
    """
    if per_node is None:
        if plan.parallel.dp == "auto":
            message = "the plan does not set the number of ranks (`dp` is auto)"
            raise UsageError("per-node", message, hint="add `--per-node N`")
        per_node, remainder = divmod(plan.world(), nodes)
        if remainder or not per_node:
            raise UsageError(
                "per-node",
                f"the plan's {plan.world()} ranks cannot be divided evenly among {nodes} hosts",
                hint="use another `--nodes` or `dp`, or `--set 'parallel.dp=\"auto\"'` and `--per-node N`",
            )
    if problems := check_plan(plan, nodes * per_node):
        raise PlanError.from_diagnostics(problems)
    resumes = plan.checkpoint is not None
    return Job(plan.run.name, nodes, per_node, tuple(arguments), plan.run.device != "cpu", resumes)


def torchrun_command(job: Job) -> str:
    """Returns a shell script with one command, to be run on each host with the same HEAD, one of the hosts, in its environment.
    Arguments of the script, such as `--resume auto`, are passed to the run.
    """
    module = shlex.join(("-m", "train_cli", *job.arguments))
    ranks = f"--nnodes {job.nodes} --nproc-per-node {job.per_node}"
    if job.nodes == 1:
        return f'torchrun --standalone {ranks} {module} "$@"\n'
    return f"""\
# Run this on each of {job.nodes} hosts, with the same plan, files and versions. HEAD is one of them, as all resolve it.
torchrun {ranks} --rdzv-id {job.label} --rdzv-backend c10d \\
  --rdzv-endpoint "${{HEAD:?set it to a host that all hosts can reach}}:${{PORT:-{PORT}}}" \\
  {module} "$@"
"""


def slurm_script(job: Job) -> str:
    """Returns a script for `sbatch`.

    The script copies srun's variables to those that Sley and torch read. A failed task ends all others. If the run saves
    checkpoints, the job may be requeued and resumes from the newest one.
    """
    options = [f"--job-name={job.label}", f"--nodes={job.nodes}", f"--ntasks-per-node={job.per_node}"]
    options += [f"--gpus-per-node={job.per_node}"] if job.uses_gpus else []
    options += ["--requeue"] if job.resumes else ["--no-requeue"]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in options),
            "# Add your cluster's options: --partition, --account, --time; --cpus-per-task for the threads of each rank.",
            "set -euo pipefail",
            'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "export MASTER_ADDR",
            "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))  # jobs on one host have different ports",
            "export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}",
            f"export WORLD_SIZE={job.world} LOCAL_WORLD_SIZE={job.per_node}",
            "# shellcheck disable=SC2016  # each task expands its own variables",
            "srun --kill-on-bad-exit=1 bash -c \\",
            "  'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec \"$@\"' rank " + shlex.join(("train-cli", *job.arguments)),
            "",
        ]
    )

"""`train-cli launch`: text that starts a plan on several hosts, for torchrun or SLURM; starts nothing itself.

Other engines come from packages, as entry points of the group `sley.launchers`:

    [project.entry-points."sley.launchers"]
    flux = "my_package.flux:script"           # a function of a Job that returns the text

makes `train-cli launch plan.toml --on flux`. examples/launch has a Kubeflow TrainJob and a program for Ray to start from.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import Annotated

import typer

from sley_core.errors import PlanError, UsageError
from sley_core.plan.check import check_plan
from sley_core.plan.load import load_plan
from sley_core.plan.plan import Plan
from train_cli.options import PlanArgument, SetOption

GROUP = "sley.launchers"
PORT = 29500


def launch(
    plan: PlanArgument,
    on: Annotated[str, typer.Option("--on", metavar="ENGINE", help="What starts the ranks: torchrun, slurm, or a plugin.")],
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", min=1, help="The number of hosts.")],
    per_node: Annotated[
        int | None, typer.Option("--per-node", metavar="N", min=1, help="Ranks on each host, where the plan leaves it open.")
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Print a command or script that runs the plan on N hosts, to be submitted with the engine's own client."""
    engines: dict[str, Callable[[Job], str]] = {"torchrun": torchrun_command, "slurm": slurm_script}
    points = {point.name: point for point in entry_points(group=GROUP)}
    if on not in engines and on not in points:
        names = sorted({*engines, *points})
        close = get_close_matches(on, names, n=1)
        hint = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(names)}; examples/launch has others to copy"
        raise UsageError("launch-engine", f"nothing here starts ranks by `{on}`", hint=hint)
    changes = overrides or []
    arguments = ["run", str(plan), *(part for change in changes for part in ("--set", change))]
    job = job_of(load_plan(plan, changes), nodes, per_node, arguments)
    typer.echo((engines[on] if on in engines else points[on].load())(job), nl=False)


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
    def label(self) -> str:
        """The name as SLURM and Kubernetes take it: small letters, digits and `-`, at most 50 of them, a letter first."""
        plain = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")
        return (plain if plain[:1].isalpha() else f"sley-{plain}")[:50].rstrip("-")


def job_of(plan: Plan, nodes: int, per_node: int | None, arguments: Sequence[str]) -> Job:
    """Returns the job of `plan` on `nodes` hosts. per_node: None for the plan's world divided by `nodes`.

    Raises PlanError for a world that the plan does not divide into, with all of its problems; UsageError "per-node" where the
    plan leaves the world open, or does not spread evenly.
    """
    if per_node is None:
        if plan.parallel.dp == "auto":
            message = "the plan leaves the number of ranks open (`dp` is auto), so nothing says how many a host has"
            raise UsageError("per-node", message, hint="add `--per-node N`")
        per_node, rest = divmod(plan.world(), nodes)
        if rest or not per_node:
            raise UsageError(
                "per-node",
                f"the plan's {plan.world()} ranks do not spread evenly over {nodes} hosts",
                hint="choose another `--nodes` or `dp`, or `--set 'parallel.dp=\"auto\"'` and `--per-node N`",
            )
    if problems := check_plan(plan, nodes * per_node):
        raise PlanError.many(problems)
    goes_on = plan.checkpoint is not None
    return Job(plan.run.name, nodes, per_node, tuple(arguments), plan.run.device != "cpu", goes_on)


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
            "  'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec \"$@\"' rank " + shlex.join(("train-cli", *job.arguments)),
            "",
        ]
    )

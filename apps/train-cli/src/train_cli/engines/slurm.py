"""A batch script for SLURM: one task per rank, all of them started by one srun."""

from __future__ import annotations

from train_cli.engines.job import Job


def render(job: Job) -> str:
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

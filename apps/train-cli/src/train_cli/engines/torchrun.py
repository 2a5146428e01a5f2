"""The command line for torchrun, the same on every host."""

from __future__ import annotations

import shlex

from train_cli.engines.job import Job

PORT = 29500


def render(job: Job) -> str:
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

"""`train-cli launch`: what starts a plan on several hosts, as text for the engine's own client; starts nothing itself."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from sley_core.errors import UsageError
from sley_core.plan.load import load_plan
from train_cli.engines import job_of, kubeflow_manifest, ray_program, slurm_script, torchrun_command
from train_cli.options import PlanArgument, SetOption


class Engine(StrEnum):
    """What starts the ranks."""

    torchrun = "torchrun"
    slurm = "slurm"
    kubeflow = "kubeflow"
    ray = "ray"


def launch(
    plan: PlanArgument,
    on: Annotated[Engine, typer.Option("--on", help="What starts the ranks.")],
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", min=1, help="The number of hosts.")],
    per_node: Annotated[
        int | None, typer.Option("--per-node", metavar="N", min=1, help="Ranks on each host, where the plan leaves it open.")
    ] = None,
    overrides: SetOption = None,
    image: Annotated[
        str | None, typer.Option("--image", metavar="NAME", help="For kubeflow: has Sley, the plan and its files.")
    ] = None,
) -> None:
    """Print a command, script or manifest that runs the plan on N hosts, to be submitted with the engine's own client."""
    if (image is None) == (on is Engine.kubeflow):
        what = "a pod needs an image" if image is None else f"`--image` says nothing to {on}"
        raise UsageError("image", what, hint="`--image NAME` belongs to `--on kubeflow`")
    changes = overrides or []
    arguments = ["run", str(plan), *(part for change in changes for part in ("--set", change))]
    job = job_of(load_plan(plan, changes), nodes, per_node, arguments)
    match on:
        case Engine.torchrun:
            text = torchrun_command(job)
        case Engine.slurm:
            text = slurm_script(job)
        case Engine.kubeflow:
            assert image is not None
            text = kubeflow_manifest(job, image)
        case Engine.ray:
            text = ray_program(job)
    typer.echo(text, nl=False)

"""Implements `train-cli calibrate`, which measures this machine, in its own process or on local ranks that it starts."""

import os
from pathlib import Path
from typing import Annotated

import typer

from sley_core.errors import EXIT_OK, UsageError
from sley_core.plan.load import load_plan
from sley_estimate.machine import MachineFile, machine_text
from train_cli.console import SetOption, Settings, print_fault, print_line
from train_cli.faults import Fault, write_error_file

TIMEOUT_S = 60.0  # the limit of every wait between ranks


def calibrate(
    context: typer.Context,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The machine file to write, in TOML.")],
    plan: Annotated[
        Path | None, typer.Option("--plan", metavar="PLAN", help="Also measure each distinct layer of this plan's model.")
    ] = None,
    overrides: SetOption = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", metavar="N", min=2, help="Start N local ranks and measure their communication.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Measure this machine and write its file: the device, the exchanges of ranks, and the layers of a plan."""
    if overrides and plan is None:
        raise UsageError("calibrate-plan", "`--set` changes a plan, but `--plan` is missing")
    is_rank = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if not is_rank:
        if out.exists() and not force:
            raise UsageError("machine-exists", f"the file `{out}` exists already", hint="use `--force` to replace it")
        if not out.absolute().parent.is_dir():
            raise UsageError("machine-folder", f"the folder `{out.absolute().parent}` does not exist")
    if ranks is not None and not is_rank:
        if plan is not None:
            load_plan(plan, overrides or [])  # reports a mistake once instead of on each rank
        from train_cli.local_launch import launch

        arguments = {"out": str(out), "plan": str(plan) if plan else None, "overrides": overrides or []}
        target = "sley_estimate.commands.calibrate:measure_on_rank"
        fault = launch(target, arguments, ranks, out.absolute().parent, sigterm_timeout_s=TIMEOUT_S)
        print_fault(fault, context.ensure_object(Settings))
        raise typer.Exit(fault.exit_code)
    measure_on_rank(str(out), str(plan) if plan else None, overrides or [])


def measure_on_rank(out: str, plan: str | None, overrides: list[str]) -> int:
    """Measures this machine, alone or as a rank of a local launch. Rank 0 writes the file `out`. Returns the exit code."""
    from sley_core.comm.world import World
    from sley_estimate.calibrate.links import measure_machine

    try:
        resolved = load_plan(Path(plan), overrides) if plan else None
        device = resolved.run.device if resolved else "auto"
        with World.join(device, timeout_s=TIMEOUT_S) as world:
            machine = measure_machine(world, resolved, TIMEOUT_S)
    except Exception as error:
        write_error_file(Fault.from_error(error))
        raise
    if machine is not None:
        Path(out).write_text(machine_text(machine), "utf-8")
        print_line(f"{machine.device.name}: {out} has {_describe_contents(machine)}")
    return EXIT_OK


def _describe_contents(machine: MachineFile) -> str:
    text = "the device"
    if machine.links.same_host is not None:
        text += ", links between ranks of this host"
    for layer in machine.layers[:1]:
        text += f", {len(machine.layers)} layers under {layer.activations} with microbatches of {layer.micro_size}"
    return text

"""`train-cli verify`: trains a plan for a few steps in its layout and in one process, and compares the two runs.

    this process     trains the plan in one process ──> losses, gradients, weights of each step, in a temporary folder
    its ranks        train the plan's layout        ──> each rank compares its tensors ──> findings
    this process     prints the findings: agreement, or the first difference

sley-testing compares the results.
"""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sley_core.errors import EXIT_OK, EXIT_RUN_FAILED, UsageError
from sley_core.plan.load import load_plan
from train_cli import console
from train_cli.commands.run import check_world_size, num_devices
from train_cli.main import import_optional
from train_cli.one_process import has_layout, one_process_plan, read_only_plan
from train_cli.stopping import sigterm_timeout_s

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan
    from sley_testing.verify import RankFindings


def verify(
    context: typer.Context,
    plan: console.PlanArgument,
    overrides: console.SetOption = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="The optimizer steps to compare.")] = 3,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            metavar="T",
            min=0.0,
            help="The allowed relative error; default: that of the plan's precision and gradient handlers.",
        ),
    ] = None,
    world_size: console.WorldOption = None,
    output_format: console.FormatOption = console.OutputFormat.text,
) -> None:
    """Compare a plan's layout with a single-process run of the same plan: loss, gradient norm, every gradient and weight."""
    settings = context.ensure_object(console.Settings)
    if "RANK" in os.environ:
        raise UsageError("verify-ranks", "`verify` starts its own ranks", hint="run it without a launcher")
    import_optional("testing", "sley_testing", "`train-cli verify`")
    overrides = overrides or []
    loaded = load_plan(plan, overrides)
    world_size = check_world_size(loaded, world_size or loaded.world_size(num_devices(loaded)))
    if world_size == 1 and not has_layout(loaded):
        hint = "use a layout such as `--set parallel.dp=2`, or `--world 2` if the plan does not set the number of ranks"
        raise UsageError("nothing-to-verify", "the plan has one process, so there is nothing to compare", hint=hint)
    if steps > loaded.run.steps:
        hint = "use fewer `--steps`, or `--set run.steps=N`"
        raise UsageError("verify-steps", f"the plan has {loaded.run.steps} steps, not {steps}", hint=hint)
    from train_cli.meta_model import check_model

    check_model(loaded, world_size)
    from sley_testing import verify as comparison

    arguments = {"path": str(plan), "overrides": overrides, "steps": steps}
    ranks_findings = _compare_with_one_process(loaded, world_size, arguments, settings)
    allowed = comparison.compute_limits(loaded, tolerance)
    if output_format is console.OutputFormat.json:
        typer.echo(json.dumps(comparison.findings_to_json(ranks_findings, allowed, steps), indent=2))
    else:
        typer.echo("\n".join(comparison.report_lines(ranks_findings, allowed, steps)))
    is_idle = comparison.is_every_step_skipped(ranks_findings, steps)
    if is_idle:
        console.print_line("no step updated the weights, so no weight was compared; use more `--steps`")
    raise typer.Exit(EXIT_RUN_FAILED if is_idle or comparison.find_differences(ranks_findings, allowed) else EXIT_OK)


def _compare_with_one_process(
    plan: Plan, world_size: int, arguments: dict[str, Any], settings: console.Settings
) -> list[RankFindings]:
    """Trains `plan` in one process and then on `world_size` ranks, and returns the findings of all ranks.

    arguments: the arguments of `compare_on_rank` except the folder. Raises typer.Exit if one of the runs does not finish.
    """
    import torch

    from sley_testing.verify import check_complete, find_dropout_modules, read_findings, save_reference
    from train_cli.local_launch import launch
    from train_cli.rank import open_run

    with TemporaryDirectory(prefix="sley-verify-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with open_run(one_process_plan(plan), folder) as (run, signal_handler):
            if plan.parallel.sp > 1 and (layers := find_dropout_modules(run)):
                reason = f"`{layers[0]}` draws different random numbers for each slice"
                message = f"a model with dropout cannot be compared with sp > 1, since {reason}"
                raise UsageError("verify-dropout", message, hint="remove the dropout or `sp` to verify the plan")
            signal_handler.call_on_signal(run.stop)
            save_reference(run, arguments["steps"], folder)
        if signal_handler.exit_code is not None:
            raise typer.Exit(signal_handler.exit_code)
        del run
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the ranks need the memory that torch caches in this process
        target, limit_s = f"{__name__}:compare_on_rank", sigterm_timeout_s(plan)
        fault = launch(target, {**arguments, "folder": name}, world_size, folder, sigterm_timeout_s=limit_s)
        console.print_fault(fault, settings)
        if fault.exit_code != EXIT_OK:
            raise typer.Exit(fault.exit_code)
        ranks_findings = read_findings(folder, world_size)
        check_complete(ranks_findings, folder)
        return ranks_findings


def compare_on_rank(path: str, overrides: list[str], steps: int, folder: str) -> int:
    """Takes the steps of one rank and compares them with the reference in `folder`. Returns the rank's exit code."""
    from sley_testing.verify import compare_steps
    from train_cli.rank import open_run

    with open_run(read_only_plan(load_plan(Path(path), overrides)), Path(folder)) as (run, signal_handler):
        signal_handler.call_on_signal(run.stop)
        compare_steps(run, steps, Path(folder))
    return signal_handler.exit_code or EXIT_OK

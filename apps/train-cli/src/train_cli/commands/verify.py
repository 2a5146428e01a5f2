"""`train-cli verify`: trains the plan's layout and one process of the same plan for a few steps, and compares them.

this process     one process of the plan ──> numbers, gradients, weights of each step, in a temporary folder
its ranks        the plan's layout       ──> each compares what it holds ──> findings
this process     findings ──> what agrees, or what differs first
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from sley_core.errors import EXIT_OK, EXIT_RUN_FAILED, UsageError
from sley_core.plan.load import load_plan
from train_cli import console, lifeline
from train_cli.as_rank import as_rank
from train_cli.commands.run import check, num_devices
from train_cli.console import Settings
from train_cli.one_process import in_layout, in_one_process
from train_cli.options import PlanArgument, SetOption, WorldOption
from train_cli.stopping import terminated_s
from train_cli.verify.findings import differences, in_words, read

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan
    from sley_core.run import Run
    from train_cli.stopping import Stopping


def verify(
    context: typer.Context,
    plan: PlanArgument,
    overrides: SetOption = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Optimizer steps to compare.")] = 3,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            metavar="T",
            min=0.0,
            help="The relative error that is allowed; left out, that of the plan's precision and of its handlers' records.",
        ),
    ] = None,
    world: WorldOption = None,
    against: Annotated[Path | None, typer.Option("--against", hidden=True)] = None,
) -> None:
    """Compare the plan's layout with one process of the same plan: loss, gradient norm, every gradient and weight."""
    settings = context.ensure_object(Settings)
    changes = overrides or []
    if against is not None and lifeline.is_held():
        raise typer.Exit(_as_rank(plan, changes, steps, against, settings))
    if against is not None or "RANK" in os.environ:
        raise UsageError("verify-ranks", "`verify` starts its ranks itself", hint="call it without a launcher")
    loaded = load_plan(plan, changes)
    size = check(loaded, world or loaded.world(num_devices(loaded)))
    if size == 1:
        hint = "give a layout, such as `--set parallel.dp=2`, or `--world 2` where the plan leaves it open"
        raise UsageError("nothing-to-verify", "the plan trains one process, so there is nothing to compare", hint=hint)
    if steps > loaded.run.steps:
        hint = "give fewer `--steps`, or `--set run.steps=...`"
        raise UsageError("verify-steps", f"the plan has {loaded.run.steps} steps, not {steps}", hint=hint)
    from train_cli.model_check import check_model

    check_model(loaded, size)
    with TemporaryDirectory(prefix="sley-verify-", ignore_cleanup_errors=True) as name:
        raise typer.Exit(_compared(plan, changes, loaded, size, steps, tolerance, Path(name), settings))


def _compared(
    path: Path,
    changes: list[str],
    plan: Plan,
    size: int,
    steps: int,
    tolerance: float | None,
    folder: Path,
    settings: Settings,
) -> int:
    """Trains both, prints what was found, and returns the exit code."""
    from train_cli.local_launch import launch
    from train_cli.rank import on_rank
    from train_cli.verify.measure import keep, limits

    def work(run: Run, stopping: Stopping) -> None:
        if plan.parallel.sp > 1:
            refuse_dropout(run)
        stopping.working(run.stop)
        keep(run, steps, folder)

    code = on_rank(in_one_process(plan), folder, work)
    if code != EXIT_OK:
        return code
    _free_devices()
    arguments = ["verify", str(path), *(part for change in changes for part in ("--set", change))]
    arguments += ["--steps", str(steps), "--against", str(folder)]
    fault = launch(arguments, size, folder, say=console.say, terminated_s=terminated_s(plan))
    console.show(fault, settings)
    if fault.exit_code != EXIT_OK:
        return fault.exit_code
    ranks, allowed = read(folder, size), limits(plan, tolerance)
    for line in in_words(ranks, allowed, steps):
        typer.echo(line)
    if len(ranks[0].skipped) == steps:
        console.say("no step was taken, so that no weight was compared: give more `--steps`")
        return EXIT_RUN_FAILED
    return EXIT_RUN_FAILED if differences(ranks, allowed) else EXIT_OK


def _as_rank(path: Path, changes: list[str], steps: int, folder: Path, settings: Settings) -> int:
    """Takes the steps of one rank of the layout, beside what is in `folder`; returns its exit code."""

    def begin(_: ExitStack) -> Callable[[], int]:
        plan = in_layout(load_plan(path, changes))
        from train_cli.rank import on_rank
        from train_cli.verify.measure import compare

        def work(run: Run, stopping: Stopping) -> None:
            stopping.working(run.stop)
            compare(run, steps, folder)

        return partial(on_rank, plan, folder, work)

    return as_rank(int(os.environ["RANK"]), settings, begin)


def refuse_dropout(run: Run) -> None:
    """Raises UsageError if the model drops at random: slices of a sequence on several ranks draw other numbers."""
    from train_cli.verify.measure import dropouts

    if found := dropouts(run):
        message = (
            f"with sp > 1 a model with dropout cannot be compared: `{found[0]}` draws other numbers for each slice"
        )
        raise UsageError("verify-dropout", message, hint="verify it without dropout, or this layout without `sp`")


def _free_devices() -> None:
    """Gives memory that torch keeps for this process back to the device, for the ranks."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

"""`train-cli verify`: trains the plan's layout and one process of the same plan for a few steps, and compares them; with
`--plain` a plain loop takes the steps of the one process.

this process     one process of the plan ──> numbers, gradients, weights of each step, in a temporary folder
its ranks        the plan's layout       ──> each compares what it holds ──> findings
this process     findings ──> what agrees, or what differs first

With `--league` it takes plans of its own (`train_cli/league`).
"""

from __future__ import annotations

import json
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
from train_cli.lazy import module_of
from train_cli.one_process import has_layout, in_layout, in_one_process
from train_cli.options import FormatOption, OutputFormat, SetOption, WorldOption
from train_cli.stopping import terminated_s
from train_cli.verify.findings import (
    Limits,
    RankFindings,
    SeenHabit,
    as_json,
    differences,
    habits_in_words,
    in_words,
    no_step_taken,
    read,
)

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan
    from sley_core.run import Run
    from train_cli.stopping import Stopping

STEPS = 3
"""How many steps are compared where `--steps` does not say so."""


def verify(
    context: typer.Context,
    plan: Annotated[
        Path | None, typer.Argument(metavar="[PLAN]", help="The plan, a TOML file; none with --league.")
    ] = None,
    overrides: SetOption = None,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="N", min=1, help=f"Optimizer steps to compare; left out, {STEPS}.")
    ] = None,
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
    plain: Annotated[
        bool,
        typer.Option(
            "--plain",
            help="Compare with a plain PyTorch loop over the same layers, and name the model's habits that need care.",
        ),
    ] = False,
    league: Annotated[
        bool, typer.Option("--league", help="In place of a plan: the field's silent errors, a small plan each.")
    ] = False,
    rows: Annotated[
        str | None, typer.Option("--rows", metavar="NAME,...", help="The rows of the league to play; left out, all.")
    ] = None,
    form: FormatOption = OutputFormat.text,
    against: Annotated[Path | None, typer.Option("--against", hidden=True)] = None,
) -> None:
    """Compare a plan's layout with one process of the same plan: loss, gradient norm, every gradient and weight."""
    settings = context.ensure_object(Settings)
    is_rank = against is not None and lifeline.is_held()
    if not is_rank and (against is not None or "RANK" in os.environ):
        raise UsageError("verify-ranks", "`verify` starts its ranks itself", hint="call it without a launcher")
    of_plan = {"a plan": plan, "--set": overrides, "--steps": steps, "--tolerance": tolerance, "--world": world}
    of_plan["--plain"] = plain or None
    module_of("testing", "sley_testing", "`train-cli verify`")
    _check_what(league, [name for name, value in of_plan.items() if value is not None], rows)
    if plan is None:
        from train_cli.league.command import chosen, play_as_rank, play_here

        picked = chosen(rows)
        raise typer.Exit(play_as_rank(picked, against, settings) if against else play_here(picked, form, settings))
    changes, steps = overrides or [], steps or STEPS
    if against is not None:
        raise typer.Exit(_as_rank(plan, changes, steps, against, settings))
    loaded = load_plan(plan, changes)
    size = check(loaded, world or loaded.world(num_devices(loaded)))
    if size == 1 and not has_layout(loaded) and not plain:
        hint = (
            "give `--plain` to compare with a plain loop, or a layout, such as `--set parallel.dp=2`, or `--world 2` where the "
            "plan leaves it open"
        )
        raise UsageError("nothing-to-verify", "the plan trains one process, so there is nothing to compare", hint=hint)
    if steps > loaded.run.steps:
        hint = "give fewer `--steps`, or `--set run.steps=...`"
        raise UsageError("verify-steps", f"the plan has {loaded.run.steps} steps, not {steps}", hint=hint)
    from train_cli.model_check import check_model

    check_model(loaded, size)
    with TemporaryDirectory(prefix="sley-verify-", ignore_cleanup_errors=True) as name:
        from train_cli.verify.measure import limits

        habits: list[SeenHabit] | None = [] if plain else None
        try:
            found = _compared(plan, changes, loaded, size, steps, Path(name), settings, habits)
        finally:  # a run that is refused, too, may be refused for one of them
            if form is OutputFormat.text:
                for line in habits_in_words(habits or ()):
                    typer.echo(line)
        raise typer.Exit(_told(found, limits(loaded, tolerance, is_plain=plain), steps, form, habits))


def _check_what(league: bool, of_plan: list[str], rows: str | None) -> None:
    """Raises UsageError unless the arguments name either a plan or the league. of_plan: the given options that only a plan
    takes.
    """
    ways = "`train-cli verify plan.toml` compares a plan, `train-cli verify --league` the field's silent errors"
    if league and of_plan:
        raise UsageError("verify-what", f"the league has plans of its own: it does not take {of_plan[0]}", hint=ways)
    if not league and rows is not None:
        raise UsageError("verify-what", "`--rows` are those of the league", hint="give `--league` too")
    if not league and "a plan" not in of_plan:
        raise UsageError("verify-what", "there is nothing to verify", hint=ways)


def _compared(
    path: Path,
    changes: list[str],
    plan: Plan,
    size: int,
    steps: int,
    folder: Path,
    settings: Settings,
    habits: list[SeenHabit] | None,
) -> list[RankFindings]:
    """Trains both and returns the findings of all ranks. Raises typer.Exit where one of the two was not trained to its end.

    habits: None to compare with one process; else a plain loop's are added, with which ranks are compared.
    """
    from train_cli.local_launch import launch
    from train_cli.rank import on_rank
    from train_cli.verify.measure import check_complete, keep

    def work(run: Run, stopping: Stopping) -> None:
        if plan.parallel.sp > 1:
            refuse_dropout(run)
        stopping.working(run.stop)
        if habits is None:
            keep(run, steps, folder)
        else:
            keep_plain(run, steps, folder, habits)

    single = in_one_process(plan)
    if habits is not None:
        from train_cli.verify.plain import keep_plain, refuse_unlike

        refuse_unlike(single)
    code = on_rank(single, folder, work)
    if code != EXIT_OK:
        raise typer.Exit(code)
    _free_devices()
    arguments = ["verify", str(path), *(part for change in changes for part in ("--set", change))]
    arguments += ["--steps", str(steps), "--against", str(folder)]
    fault = launch(arguments, size, folder, say=console.say, terminated_s=terminated_s(plan))
    console.show(fault, settings)
    if fault.exit_code != EXIT_OK:
        raise typer.Exit(fault.exit_code)
    ranks = read(folder, size)
    check_complete(ranks, folder)
    return ranks


def _told(
    ranks: list[RankFindings], allowed: Limits, steps: int, form: OutputFormat, habits: list[SeenHabit] | None
) -> int:
    """Prints the findings, and returns the exit code. habits: the model's, if ranks were compared with a plain loop."""
    if form is OutputFormat.json:
        told = as_json(ranks, allowed, steps)
        if habits is not None:
            told["habits"] = [{"where": one.where, "what": one.what} for one in habits]
        typer.echo(json.dumps(told, indent=2))
    else:
        for line in in_words(ranks, allowed, steps, is_plain=habits is not None):
            typer.echo(line)
    if no_step_taken(ranks, steps):
        console.say("no step was taken, so that no weight was compared: give more `--steps`")
        return EXIT_RUN_FAILED
    return EXIT_RUN_FAILED if differences(ranks, allowed) else EXIT_OK


def _as_rank(path: Path, changes: list[str], steps: int, folder: Path, settings: Settings) -> int:
    """Takes the steps of one rank of the layout, compares them with the reference in `folder`, and returns the exit code."""

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
    """Raises UsageError if the model uses dropout: slices of a sequence on several ranks draw other numbers."""
    from train_cli.verify.measure import dropouts

    if found := dropouts(run):
        message = (
            f"with sp > 1 a model with dropout cannot be compared: `{found[0]}` draws other numbers for each slice"
        )
        raise UsageError("verify-dropout", message, hint="verify it without dropout, or this layout without `sp`")


def _free_devices() -> None:
    """Returns the memory that torch caches for this process to the device, for the ranks."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

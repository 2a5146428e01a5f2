"""`train-cli verify`: trains a plan's layout and the same plan in one process for a few steps, and compares them. With
`--plain` a plain PyTorch loop replaces the one process.

this process     one process of the plan ──> losses, gradients, weights of each step, in a temporary folder
its ranks        the plan's layout       ──> each rank compares its tensors ──> findings
this process     findings ──> agreement, or the first difference

With `--league` it verifies plans of the test kit (sley-testing), which also compares the results.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sley_core.errors import EXIT_HUNG_UP, EXIT_OK, EXIT_RUN_FAILED, UsageError
from sley_core.plan.load import load_plan
from train_cli import console
from train_cli.commands.run import check, num_devices
from train_cli.console import Settings
from train_cli.faults import Fault
from train_cli.main import module_of
from train_cli.one_process import has_layout, one_process_plan, read_only_plan
from train_cli.options import FormatOption, OutputFormat, SetOption, WorldOption
from train_cli.progress import ranks
from train_cli.stopping import TERMINATED_S, terminated_s

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan
    from sley_testing.league.rows import LeagueRow
    from sley_testing.verify.findings import Habit, RankFindings

STEPS = 3
"""The default number of steps to compare."""


def verify(
    context: typer.Context,
    plan: Annotated[Path | None, typer.Argument(metavar="[PLAN]", help="The plan, a TOML file; none with --league.")] = None,
    overrides: SetOption = None,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="N", min=1, help=f"The optimizer steps to compare; default: {STEPS}.")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            metavar="T",
            min=0.0,
            help="The allowed relative error; default: that of the plan's precision and gradient handlers.",
        ),
    ] = None,
    world: WorldOption = None,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain",
            help="Compare with a plain PyTorch loop over the same layers, and list code of the model that needs care.",
        ),
    ] = False,
    league: Annotated[
        bool, typer.Option("--league", help="Instead of a plan, verify small plans that test the field's known silent errors.")
    ] = False,
    rows: Annotated[
        str | None, typer.Option("--rows", metavar="NAME,...", help="The rows of the league to verify; default: all.")
    ] = None,
    form: FormatOption = OutputFormat.text,
) -> None:
    """Compare a plan's layout with one process of the same plan: loss, gradient norm, every gradient and weight."""
    settings = context.ensure_object(Settings)
    if "RANK" in os.environ:
        raise UsageError("verify-ranks", "`verify` starts its own ranks", hint="call it without a launcher")
    plan_options = {"a plan": plan, "--set": overrides, "--steps": steps, "--tolerance": tolerance, "--world": world}
    plan_options["--plain"] = plain or None
    module_of("testing", "sley_testing", "`train-cli verify`")
    _check_arguments(league, [name for name, value in plan_options.items() if value is not None], rows)
    if plan is None:
        raise typer.Exit(_verify_league(rows, form, settings))
    changes, steps = overrides or [], steps or STEPS
    loaded = load_plan(plan, changes)
    size = check(loaded, world or loaded.world(num_devices(loaded)))
    if size == 1 and not has_layout(loaded) and not plain:
        hint = (
            "use `--plain` to compare with a plain loop, or a layout such as `--set parallel.dp=2`, or `--world 2` if the plan "
            "does not set the number of ranks"
        )
        raise UsageError("nothing-to-verify", "the plan has one process, so there is nothing to compare", hint=hint)
    if steps > loaded.run.steps:
        hint = "use fewer `--steps`, or `--set run.steps=N`"
        raise UsageError("verify-steps", f"the plan has {loaded.run.steps} steps, not {steps}", hint=hint)
    from train_cli.meta_model import check_model

    check_model(loaded, size)
    from sley_testing.verify import findings
    from sley_testing.verify.measure import limits

    habits: list[Habit] | None = [] if plain else None
    arguments = {"path": str(plan), "changes": changes, "steps": steps}
    try:
        ranks_findings = _compare_with_one_process(loaded, size, arguments, settings, habits)
    finally:  # a habit may be the reason for a refusal
        if form is OutputFormat.text:
            for line in findings.habit_lines(habits or ()):
                typer.echo(line)
    allowed = limits(loaded, tolerance, is_plain=plain)
    if form is OutputFormat.json:
        content = findings.findings_to_json(ranks_findings, allowed, steps)
        if habits is not None:
            content["habits"] = [{"where": habit.location, "what": habit.description} for habit in habits]
        typer.echo(json.dumps(content, indent=2))
    else:
        typer.echo("\n".join(findings.report_lines(ranks_findings, allowed, steps, is_plain=plain)))
    is_idle = findings.no_step_taken(ranks_findings, steps)
    if is_idle:
        console.say("no step was taken, so no weight was compared; use more `--steps`")
    raise typer.Exit(EXIT_RUN_FAILED if is_idle or findings.differences(ranks_findings, allowed) else EXIT_OK)


def _check_arguments(league: bool, plan_options: list[str], rows: str | None) -> None:
    """Raises UsageError unless the arguments name either a plan or the league. plan_options: the options in use that need a
    plan.
    """
    hint = "use `train-cli verify plan.toml` for a plan, or `train-cli verify --league` for the field's silent errors"
    if league and plan_options:
        raise UsageError("verify-what", f"`--league` has its own plans and cannot be used with {plan_options[0]}", hint=hint)
    if not league and rows is not None:
        raise UsageError("verify-what", "`--rows` needs `--league`", hint="add `--league`")
    if not league and "a plan" not in plan_options:
        raise UsageError("verify-what", "there is nothing to verify", hint=hint)


def _compare_with_one_process(
    plan: Plan, size: int, arguments: dict[str, Any], settings: Settings, habits: list[Habit] | None
) -> list[RankFindings]:
    """Trains `plan` in one process and then on `size` ranks, and returns the findings of all ranks. Raises typer.Exit if either
    did not finish.

    arguments: the arguments of `compare_on_rank` except the folder. habits: if a list, compares with a plain loop and adds
    the habits that the loop finds.
    """
    import torch

    from sley_testing.verify.findings import read_findings
    from sley_testing.verify.measure import (
        check_complete,
        check_plain_support,
        dropout_modules,
        save_plain_steps,
        save_reference,
    )
    from train_cli.local_launch import launch
    from train_cli.rank import joined

    single = one_process_plan(plan)
    if habits is not None:
        check_plain_support(single)
    with TemporaryDirectory(prefix="sley-verify-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with joined(single, folder) as (run, stopping):
            if plan.parallel.sp > 1 and (layers := dropout_modules(run)):
                message = (
                    f"with sp > 1 a model with dropout cannot be compared: `{layers[0]}` draws different numbers for each slice"
                )
                raise UsageError("verify-dropout", message, hint="remove dropout, or `sp`, to verify it")
            stopping.working(run.stop)
            if habits is None:
                save_reference(run, arguments["steps"], folder)
            else:
                save_plain_steps(run, arguments["steps"], folder, habits)
        if stopping.exit_code is not None:
            raise typer.Exit(stopping.exit_code)
        del run
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the ranks need the memory that torch caches in this process
        target, limit_s = f"{__name__}:compare_on_rank", terminated_s(plan)
        fault = launch(target, {**arguments, "folder": name}, size, folder, say=console.say, terminated_s=limit_s)
        console.show(fault, settings)
        if fault.exit_code != EXIT_OK:
            raise typer.Exit(fault.exit_code)
        ranks_findings = read_findings(folder, size)
        check_complete(ranks_findings, folder)
        return ranks_findings


def compare_on_rank(path: str, changes: list[str], steps: int, folder: str) -> int:
    """Takes the steps of one rank, compares them with the reference in `folder`, and returns the exit code."""
    from sley_testing.verify.measure import compare_steps
    from train_cli.rank import joined

    with joined(read_only_plan(load_plan(Path(path), changes)), Path(folder)) as (run, stopping):
        stopping.working(run.stop)
        compare_steps(run, steps, Path(folder))
    return stopping.exit_code or EXIT_OK


def league_rows(names: str | None) -> list[LeagueRow]:
    """Returns the rows that `names` lists, separated by commas, in the league's order; all of them without a list.

    Raises UsageError "league-rows" for an unknown name.
    """
    from sley_testing.league.rows import ROWS

    row_names = [row.name for row in ROWS]
    chosen = row_names if names is None else [name.strip() for name in names.split(",")]
    for name in sorted(set(chosen) - set(row_names)):
        matches = get_close_matches(name, row_names, n=1)
        hint = f"did you mean `{matches[0]}`?" if matches else f"use one of {', '.join(row_names)}"
        raise UsageError("league-rows", f"the league has no row `{name}`", hint=hint)
    return [row for row in ROWS if row.name in chosen]


def _verify_league(names: str | None, form: OutputFormat, settings: Settings) -> int:
    """Verifies rows of the league, prints a table of results on stdout, and returns the exit code: 1 if a row does not hold.

    Raises the errors of `league_rows`, and SleyError if a plugin is not installed, before anything runs.
    """
    rows = league_rows(names)
    for row in rows:
        row.plans()
    from sley_testing.league.rows import format_results, results_to_json
    from sley_testing.league.verify import verify_rows

    with TemporaryDirectory(prefix="sley-league-", ignore_cleanup_errors=True) as name:
        by_name = {result.row.name: result for result in verify_rows(rows, Path(name), partial(_launch_rows, settings))}
    results = [by_name[row.name] for row in rows]
    if form is OutputFormat.json:
        typer.echo(json.dumps(results_to_json(results), indent=2, ensure_ascii=False))
    else:
        for line in format_results(results):
            typer.echo(line)
    return EXIT_OK if all(result.holds for result in results) else EXIT_RUN_FAILED


def _launch_rows(settings: Settings, rows: Sequence[LeagueRow], num_ranks: int, folder: Path) -> str:
    """Verifies the rows that need `num_ranks` ranks, in new processes if there are several. Returns the reason of a failure, or
    "". Raises typer.Exit if a signal ended them.
    """
    from sley_core.comm.world import World
    from sley_testing.league.verify import compare_rows
    from train_cli.local_launch import launch

    console.say(f"{len(rows)} {'row' if len(rows) == 1 else 'rows'} on {ranks(num_ranks)}")
    if num_ranks == 1:
        try:
            compare_rows(rows, World.alone("cpu"), folder)
        except Exception as error:
            fault = Fault.of(error)
        else:
            return ""
    else:
        arguments = {"names": ",".join(row.name for row in rows), "folder": str(folder)}
        target = f"{__name__}:compare_rows_on_rank"
        fault = launch(target, arguments, num_ranks, folder, say=console.say, terminated_s=TERMINATED_S)
        if fault.exit_code >= EXIT_HUNG_UP:
            raise typer.Exit(fault.exit_code)
    console.show(fault, settings)
    if fault.exit_code == EXIT_OK:
        return ""
    return fault.diagnostics[0].message if fault.diagnostics else "the ranks ended without a report"


def compare_rows_on_rank(names: str, folder: str) -> int:
    """Takes the steps of one rank for the rows `names`, compares them with `folder`, and returns the exit code."""
    from sley_core.comm.world import World
    from sley_testing.league.verify import compare_rows

    rows = league_rows(names)
    with World.join("cpu", timeout_s=rows[0].plans()[0].limits.start_timeout_s) as world:
        compare_rows(rows, world, Path(folder))
    return EXIT_OK

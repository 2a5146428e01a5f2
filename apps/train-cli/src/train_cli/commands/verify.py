"""`train-cli verify`: trains the plan's layout and one process of the same plan for a few steps, and compares them; with
`--plain` a plain loop takes the steps of the one process.

this process     one process of the plan ──> numbers, gradients, weights of each step, in a temporary folder
its ranks        the plan's layout       ──> each compares its parts ──> findings
this process     findings ──> what agrees, or what differs first

With `--league` it takes plans of its own. The test kit (sley-testing) has the league, and compares.
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
    from sley_testing.verify.findings import RankFindings, SeenHabit

STEPS = 3
"""How many steps are compared where `--steps` does not say so."""


def verify(
    context: typer.Context,
    plan: Annotated[Path | None, typer.Argument(metavar="[PLAN]", help="The plan, a TOML file; none with --league.")] = None,
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
) -> None:
    """Compare a plan's layout with one process of the same plan: loss, gradient norm, every gradient and weight."""
    settings = context.ensure_object(Settings)
    if "RANK" in os.environ:
        raise UsageError("verify-ranks", "`verify` starts its ranks itself", hint="call it without a launcher")
    of_plan = {"a plan": plan, "--set": overrides, "--steps": steps, "--tolerance": tolerance, "--world": world}
    of_plan["--plain"] = plain or None
    module_of("testing", "sley_testing", "`train-cli verify`")
    _check_what(league, [name for name, value in of_plan.items() if value is not None], rows)
    if plan is None:
        raise typer.Exit(_play_league(rows, form, settings))
    changes, steps = overrides or [], steps or STEPS
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
    from train_cli.on_meta import check_model

    check_model(loaded, size)
    from sley_testing.verify import findings
    from sley_testing.verify.measure import limits

    habits: list[SeenHabit] | None = [] if plain else None
    arguments = {"path": str(plan), "changes": changes, "steps": steps}
    try:
        ranks_findings = _compared(loaded, size, arguments, settings, habits)
    finally:  # a run that is refused, too, may be refused for one of them
        if form is OutputFormat.text:
            for line in findings.habits_in_words(habits or ()):
                typer.echo(line)
    allowed = limits(loaded, tolerance, is_plain=plain)
    if form is OutputFormat.json:
        content = findings.as_json(ranks_findings, allowed, steps)
        if habits is not None:
            content["habits"] = [{"where": habit.where, "what": habit.what} for habit in habits]
        typer.echo(json.dumps(content, indent=2))
    else:
        typer.echo("\n".join(findings.in_words(ranks_findings, allowed, steps, is_plain=plain)))
    is_idle = findings.no_step_taken(ranks_findings, steps)
    if is_idle:
        console.say("no step was taken, so that no weight was compared: give more `--steps`")
    raise typer.Exit(EXIT_RUN_FAILED if is_idle or findings.differences(ranks_findings, allowed) else EXIT_OK)


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
    plan: Plan, size: int, arguments: dict[str, Any], settings: Settings, habits: list[SeenHabit] | None
) -> list[RankFindings]:
    """Trains `plan` in one process, then on `size` ranks, and returns the findings of all ranks. Raises typer.Exit if one of
    the two was not trained to its end.

    arguments: of `compare_on_rank`, but for the folder. habits: None to compare with one process; else those of a plain loop
    are added, with which ranks are compared.
    """
    import torch

    from sley_testing.verify.findings import read
    from sley_testing.verify.measure import check_complete, dropouts, keep
    from sley_testing.verify.plain import keep_plain, refuse_unlike
    from train_cli.local_launch import launch
    from train_cli.rank import joined

    single = one_process_plan(plan)
    if habits is not None:
        refuse_unlike(single)
    with TemporaryDirectory(prefix="sley-verify-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with joined(single, folder) as (run, stopping):
            if plan.parallel.sp > 1 and (layers := dropouts(run)):
                message = (
                    f"with sp > 1 a model with dropout cannot be compared: `{layers[0]}` draws other numbers for each slice"
                )
                raise UsageError("verify-dropout", message, hint="verify it without dropout, or this layout without `sp`")
            stopping.working(run.stop)
            if habits is None:
                keep(run, arguments["steps"], folder)
            else:
                keep_plain(run, arguments["steps"], folder, habits)
        if stopping.exit_code is not None:
            raise typer.Exit(stopping.exit_code)
        del run
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the ranks need the memory that torch caches for this process
        target, limit_s = f"{__name__}:compare_on_rank", terminated_s(plan)
        fault = launch(target, {**arguments, "folder": name}, size, folder, say=console.say, terminated_s=limit_s)
        console.show(fault, settings)
        if fault.exit_code != EXIT_OK:
            raise typer.Exit(fault.exit_code)
        ranks_findings = read(folder, size)
        check_complete(ranks_findings, folder)
        return ranks_findings


def compare_on_rank(path: str, changes: list[str], steps: int, folder: str) -> int:
    """Takes the steps of one rank of the layout, compares them with the reference in `folder`, and returns the exit code."""
    from sley_testing.verify.measure import compare
    from train_cli.rank import joined

    with joined(read_only_plan(load_plan(Path(path), changes)), Path(folder)) as (run, stopping):
        stopping.working(run.stop)
        compare(run, steps, Path(folder))
    return stopping.exit_code or EXIT_OK


def league_rows(names: str | None) -> list[LeagueRow]:
    """Returns the rows that `names` lists, separated by commas, in the league's order; all of them without a list.

    Raises UsageError "league-rows" for a name that no row has.
    """
    from sley_testing.league.rows import ROWS

    known = [row.name for row in ROWS]
    chosen = known if names is None else [name.strip() for name in names.split(",")]
    for name in sorted(set(chosen) - set(known)):
        close = get_close_matches(name, known, n=1)
        hint = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(known)}"
        raise UsageError("league-rows", f"the league has no row `{name}`", hint=hint)
    return [row for row in ROWS if row.name in chosen]


def _play_league(names: str | None, form: OutputFormat, settings: Settings) -> int:
    """Plays rows of the league, prints a table of them on stdout, and returns the exit code: 1 where one does not hold.

    Raises as `league_rows`, and SleyError for a plugin that is not installed, before anything is run.
    """
    rows = league_rows(names)
    for row in rows:
        row.plans()
    from sley_testing.league.play import play
    from sley_testing.league.rows import as_json, in_lines

    with TemporaryDirectory(prefix="sley-league-", ignore_cleanup_errors=True) as name:
        by_name = {result.row.name: result for result in play(rows, Path(name), partial(_play_on_ranks, settings))}
    results = [by_name[row.name] for row in rows]
    if form is OutputFormat.json:
        typer.echo(json.dumps(as_json(results), indent=2, ensure_ascii=False))
    else:
        for line in in_lines(results):
            typer.echo(line)
    return EXIT_OK if all(result.holds for result in results) else EXIT_RUN_FAILED


def _play_on_ranks(settings: Settings, rows: Sequence[LeagueRow], num_ranks: int, folder: Path) -> str:
    """Plays rows that need `num_ranks` ranks, in processes of their own if several; returns why they failed, or nothing. Raises
    typer.Exit if a signal ended them.
    """
    from sley_core.comm.world import World
    from sley_testing.league.play import take
    from train_cli.local_launch import launch

    console.say(f"{len(rows)} {'row' if len(rows) == 1 else 'rows'} on {ranks(num_ranks)}")
    if num_ranks == 1:
        try:
            take(rows, World.alone("cpu"), folder)
        except Exception as error:
            fault = Fault.of(error)
        else:
            return ""
    else:
        arguments = {"names": ",".join(row.name for row in rows), "folder": str(folder)}
        target = f"{__name__}:play_on_rank"
        fault = launch(target, arguments, num_ranks, folder, say=console.say, terminated_s=TERMINATED_S)
        if fault.exit_code >= EXIT_HUNG_UP:
            raise typer.Exit(fault.exit_code)
    console.show(fault, settings)
    if fault.exit_code == EXIT_OK:
        return ""
    return fault.diagnostics[0].message if fault.diagnostics else "its ranks have ended without a word"


def play_on_rank(names: str, folder: str) -> int:
    """Takes the steps of one rank of the rows `names`, compares them with what is in `folder`, and returns the exit code."""
    from sley_core.comm.world import World
    from sley_testing.league.play import take

    rows = league_rows(names)
    with World.join("cpu", timeout_s=rows[0].plans()[0].limits.start_timeout_s) as world:
        take(rows, world, Path(folder))
    return EXIT_OK

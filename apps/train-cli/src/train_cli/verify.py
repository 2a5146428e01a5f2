"""Takes the steps of one process here and those of the layout on ranks of this machine, and prints the findings of the test
kit (sley-testing); or plays the league.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import typer

from sley_core.errors import EXIT_HUNG_UP, EXIT_OK, EXIT_RUN_FAILED, UsageError
from sley_core.plan.load import load_plan
from sley_testing.league.rows import ROWS, in_lines
from sley_testing.league.rows import as_json as league_json
from sley_testing.verify.findings import (
    RankFindings,
    SeenHabit,
    as_json,
    differences,
    habits_in_words,
    in_words,
    no_step_taken,
    read,
)
from train_cli import console
from train_cli.console import Settings
from train_cli.faults import Fault
from train_cli.one_process import in_layout, in_one_process
from train_cli.options import OutputFormat
from train_cli.progress import ranks
from train_cli.stopping import TERMINATED_S, terminated_s

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan
    from sley_core.run import Run
    from sley_testing.league.rows import LeagueRow


def verify_plan(
    path: Path,
    changes: list[str],
    plan: Plan,
    size: int,
    steps: int,
    tolerance: float | None,
    form: OutputFormat,
    settings: Settings,
    *,
    is_plain: bool,
) -> int:
    """Compares the layout of `plan`, on `size` ranks, with one process or a plain loop; prints the findings, and returns the
    exit code. path, changes: of the plan, for the ranks. Raises typer.Exit if one of the two was not trained to its end.
    """
    with TemporaryDirectory(prefix="sley-verify-", ignore_cleanup_errors=True) as name:
        from sley_testing.verify.measure import limits

        habits: list[SeenHabit] | None = [] if is_plain else None
        try:
            found = _compared(path, changes, plan, size, steps, Path(name), settings, habits)
        finally:  # a run that is refused, too, may be refused for one of them
            if form is OutputFormat.text:
                for line in habits_in_words(habits or ()):
                    typer.echo(line)
    allowed = limits(plan, tolerance, is_plain=is_plain)
    if form is OutputFormat.json:
        content = as_json(found, allowed, steps)
        if habits is not None:
            content["habits"] = [{"where": habit.where, "what": habit.what} for habit in habits]
        typer.echo(json.dumps(content, indent=2))
    else:
        typer.echo("\n".join(in_words(found, allowed, steps, is_plain=is_plain)))
    if no_step_taken(found, steps):
        console.say("no step was taken, so that no weight was compared: give more `--steps`")
        return EXIT_RUN_FAILED
    return EXIT_RUN_FAILED if differences(found, allowed) else EXIT_OK


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
    """Trains both and returns the findings of all ranks.

    habits: None to compare with one process; else those of a plain loop are added, with which ranks are compared.
    """
    import torch

    from sley_testing.verify.measure import check_complete, keep
    from train_cli.local_launch import launch
    from train_cli.rank import joined

    single = in_one_process(plan)
    if habits is not None:
        from sley_testing.verify.plain import keep_plain, refuse_unlike

        refuse_unlike(single)
    with joined(single, folder) as (run, stopping):
        if plan.parallel.sp > 1:
            refuse_dropout(run)
        stopping.working(run.stop)
        if habits is None:
            keep(run, steps, folder)
        else:
            keep_plain(run, steps, folder, habits)
    if stopping.exit_code is not None:
        raise typer.Exit(stopping.exit_code)
    del run
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the ranks need the memory that torch caches for this process
    arguments = {"path": str(path), "changes": changes, "steps": steps, "folder": str(folder)}
    fault = launch(
        "train_cli.verify:compare_on_rank", arguments, size, folder, say=console.say, terminated_s=terminated_s(plan)
    )
    console.show(fault, settings)
    if fault.exit_code != EXIT_OK:
        raise typer.Exit(fault.exit_code)
    found = read(folder, size)
    check_complete(found, folder)
    return found


def refuse_dropout(run: Run) -> None:
    """Raises UsageError if the model uses dropout: slices of a sequence on several ranks draw other numbers."""
    from sley_testing.verify.measure import dropouts

    if layers := dropouts(run):
        message = f"with sp > 1 a model with dropout cannot be compared: `{layers[0]}` draws other numbers for each slice"
        raise UsageError("verify-dropout", message, hint="verify it without dropout, or this layout without `sp`")


def compare_on_rank(path: str, changes: list[str], steps: int, folder: str) -> int:
    """Takes the steps of one rank of the layout, compares them with the reference in `folder`, and returns the exit code."""
    from sley_testing.verify.measure import compare
    from train_cli.rank import joined

    with joined(in_layout(load_plan(Path(path), changes)), Path(folder)) as (run, stopping):
        stopping.working(run.stop)
        compare(run, steps, Path(folder))
    return stopping.exit_code or EXIT_OK


def league_rows(names: str | None) -> list[LeagueRow]:
    """Returns the rows that `names` lists, separated by commas, in the league's order; all of them without a list.

    Raises UsageError "league-rows" for a name that no row has.
    """
    known = {row.name: row for row in ROWS}
    if names is None:
        return [*ROWS]
    chosen = {name.strip() for name in names.split(",")}
    for name in sorted(chosen - known.keys()):
        close = get_close_matches(name, known, n=1)
        hint = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(known)}"
        raise UsageError("league-rows", f"the league has no row `{name}`", hint=hint)
    return [row for row in ROWS if row.name in chosen]


def play_league(names: str | None, form: OutputFormat, settings: Settings) -> int:
    """Plays rows of the league, prints a table of them on stdout, and returns the exit code: 1 where one does not hold.

    Raises as `league_rows`, and SleyError for a plugin that is not installed, before anything is run.
    """
    rows = league_rows(names)
    for row in rows:
        row.plans()
    from sley_testing.league.play import play

    with TemporaryDirectory(prefix="sley-league-", ignore_cleanup_errors=True) as name:
        found = {result.row.name: result for result in play(rows, Path(name), partial(_play_on_ranks, settings))}
    results = [found[row.name] for row in rows]
    if form is OutputFormat.json:
        typer.echo(json.dumps(league_json(results), indent=2, ensure_ascii=False))
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
        target = "train_cli.verify:play_on_rank"
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

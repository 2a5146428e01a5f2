"""Runs `train-cli verify`: takes the steps of one process here and of the layout on ranks of this machine, and tells what the
test kit (sley-testing) finds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
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
from train_cli import console
from train_cli.as_rank import as_rank
from train_cli.console import Settings
from train_cli.faults import Fault
from train_cli.one_process import in_layout, in_one_process
from train_cli.options import OutputFormat
from train_cli.stopping import TERMINATED_S, terminated_s

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan
    from sley_core.run import Run
    from sley_testing.league.rows import LeagueRow
    from train_cli.stopping import Stopping


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
    exit code. path, changes: of the plan, for the ranks.
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
        return _told(found, limits(plan, tolerance, is_plain=is_plain), steps, form, habits)


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
    from sley_testing.verify.measure import check_complete, keep
    from train_cli.local_launch import launch
    from train_cli.rank import on_rank

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
        from sley_testing.verify.plain import keep_plain, refuse_unlike

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


def _told(ranks: list[RankFindings], allowed: Limits, steps: int, form: OutputFormat, habits: list[SeenHabit] | None) -> int:
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


def verify_as_rank(path: Path, changes: list[str], steps: int, folder: Path, settings: Settings) -> int:
    """Takes the steps of one rank of the layout, compares them with the reference in `folder`, and returns the exit code."""

    def begin(_: ExitStack) -> Callable[[], int]:
        plan = in_layout(load_plan(path, changes))
        from sley_testing.verify.measure import compare
        from train_cli.rank import on_rank

        def work(run: Run, stopping: Stopping) -> None:
            stopping.working(run.stop)
            compare(run, steps, folder)

        return partial(on_rank, plan, folder, work)

    return as_rank(int(os.environ["RANK"]), settings, begin)


def refuse_dropout(run: Run) -> None:
    """Raises UsageError if the model uses dropout: slices of a sequence on several ranks draw other numbers."""
    from sley_testing.verify.measure import dropouts

    if found := dropouts(run):
        message = f"with sp > 1 a model with dropout cannot be compared: `{found[0]}` draws other numbers for each slice"
        raise UsageError("verify-dropout", message, hint="verify it without dropout, or this layout without `sp`")


def _free_devices() -> None:
    """Returns the memory that torch caches for this process to the device, for the ranks."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def chosen(names: str | None) -> list[LeagueRow]:
    """Returns the rows that `names` lists, separated by commas, in the league's order; all of them without a list.

    Raises UsageError "league-rows" for a name that no row has.
    """
    known = {row.name: row for row in ROWS}
    if names is None:
        return [*ROWS]
    wanted = {name.strip() for name in names.split(",")}
    for name in sorted(wanted - known.keys()):
        close = get_close_matches(name, known, n=1)
        hint = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(known)}"
        raise UsageError("league-rows", f"the league has no row `{name}`", hint=hint)
    return [row for row in ROWS if row.name in wanted]


def play_here(rows: Sequence[LeagueRow], form: OutputFormat, settings: Settings) -> int:
    """Plays `rows`, prints a table of them on stdout, and returns the exit code: 1 where one does not hold.

    Raises SleyError for a plugin that is not installed, before anything is run.
    """
    for row in rows:
        row.plans()
    from sley_testing.league.play import play

    with TemporaryDirectory(prefix="sley-league-", ignore_cleanup_errors=True) as name:
        found = {result.row.name: result for result in play(rows, Path(name), partial(_start, settings))}
    results = [found[row.name] for row in rows]
    if form is OutputFormat.json:
        typer.echo(json.dumps(league_json(results), indent=2, ensure_ascii=False))
    else:
        for line in in_lines(results):
            typer.echo(line)
    return EXIT_OK if all(result.holds for result in results) else EXIT_RUN_FAILED


def play_as_rank(rows: Sequence[LeagueRow], folder: Path, settings: Settings) -> int:
    """Takes the steps of one rank of `rows`, compares them with what is in `folder`, and returns the exit code."""

    def begin(_: ExitStack) -> Callable[[], int]:
        return partial(_on_rank, rows, folder)

    return as_rank(int(os.environ["RANK"]), settings, begin)


def _on_rank(rows: Sequence[LeagueRow], folder: Path) -> int:
    """Measures the rows as one rank of several; returns the exit code."""
    from sley_core.comm.world import World
    from sley_testing.league.play import take

    with World.join("cpu", timeout_s=rows[0].plans()[0].limits.start_timeout_s) as world:
        take(rows, world, folder)
    return EXIT_OK


def _start(settings: Settings, rows: Sequence[LeagueRow], num_ranks: int, folder: Path) -> str:
    """Plays rows that need `num_ranks` ranks, in processes of their own if several; returns why they failed, or nothing. Raises
    typer.Exit if a signal ended them.
    """
    from sley_core.comm.world import World
    from sley_testing.league.play import take
    from train_cli.local_launch import launch

    console.say(f"{len(rows)} {'row' if len(rows) == 1 else 'rows'} on {num_ranks} {'rank' if num_ranks == 1 else 'ranks'}")
    if num_ranks == 1:
        try:
            take(rows, World.alone("cpu"), folder)
        except Exception as error:
            fault = Fault.of(error)
        else:
            return ""
    else:
        arguments = ["verify", "--league", "--rows", ",".join(row.name for row in rows), "--against", str(folder)]
        fault = launch(arguments, num_ranks, folder, say=console.say, terminated_s=TERMINATED_S)
        if fault.exit_code >= EXIT_HUNG_UP:
            raise typer.Exit(fault.exit_code)
    console.show(fault, settings)
    if fault.exit_code == EXIT_OK:
        return ""
    return fault.diagnostics[0].message if fault.diagnostics else "its ranks have ended without a word"

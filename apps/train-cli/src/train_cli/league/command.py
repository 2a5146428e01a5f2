"""Runs `train-cli verify --league`: plays rows on ranks of this machine, prints the table, returns the exit code."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import typer

from sley_core.errors import EXIT_HUNG_UP, EXIT_OK, EXIT_RUN_FAILED, UsageError
from train_cli import console
from train_cli.as_rank import as_rank
from train_cli.console import Settings
from train_cli.faults import Fault
from train_cli.league.row import LeagueRow
from train_cli.league.table import as_json, in_lines
from train_cli.options import OutputFormat
from train_cli.stopping import TERMINATED_S


def chosen(names: str | None) -> list[LeagueRow]:
    """Returns the rows that `names` lists, separated by commas, in the league's order; all of them without a list.

    Raises UsageError "league-rows" for a name that no row has.
    """
    from train_cli.league.rows import ROWS

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
    from train_cli.league.measure import play

    with TemporaryDirectory(prefix="sley-league-", ignore_cleanup_errors=True) as name:
        found = {result.row.name: result for result in play(rows, Path(name), partial(_start, settings))}
    results = [found[row.name] for row in rows]
    if form is OutputFormat.json:
        typer.echo(json.dumps(as_json(results), indent=2, ensure_ascii=False))
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
    from train_cli.league.measure import take

    with World.join("cpu", timeout_s=rows[0].plans()[0].limits.start_timeout_s) as world:
        take(rows, world, folder)
    return EXIT_OK


def _start(settings: Settings, rows: Sequence[LeagueRow], num_ranks: int, folder: Path) -> Fault:
    """Plays rows that need `num_ranks` ranks, in processes of their own if several. Raises typer.Exit if a signal ended
    them.
    """
    from sley_core.comm.world import World
    from train_cli.league.measure import take
    from train_cli.local_launch import launch

    console.say(
        f"{len(rows)} {'row' if len(rows) == 1 else 'rows'} on {num_ranks} {'rank' if num_ranks == 1 else 'ranks'}"
    )
    if num_ranks == 1:
        try:
            take(rows, World.alone("cpu"), folder)
        except Exception as error:
            return _shown(Fault.of(error), settings)
        return Fault((), EXIT_OK)
    arguments = ["verify", "--league", "--rows", ",".join(row.name for row in rows), "--against", str(folder)]
    fault = launch(arguments, num_ranks, folder, say=console.say, terminated_s=TERMINATED_S)
    if fault.exit_code >= EXIT_HUNG_UP:
        raise typer.Exit(fault.exit_code)
    return _shown(fault, settings)


def _shown(fault: Fault, settings: Settings) -> Fault:
    console.show(fault, settings)
    return fault

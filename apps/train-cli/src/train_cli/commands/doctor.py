"""`train-cli doctor RUN`: what went wrong in a run, from what its ranks have left in its folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from sley_core.errors import UsageError
from sley_core.export.run_weights import PLAN
from sley_core.reports.fault_report import FOLDER, FoundReports, read
from train_cli.doctor.verdict import Verdict, evidence, in_words, verdict
from train_cli.options import FormatOption, OutputFormat


def doctor(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, such as runs/NAME.")],
    form: FormatOption = OutputFormat.text,
) -> None:
    """Say what went wrong in a run: cause, rank, layer, action, remedy."""
    found = _reports(run)
    if form is OutputFormat.json:
        typer.echo(json.dumps([_data(one) for one in found], indent=2))
    elif not found:
        typer.echo(f"no rank has reported a failure in `{run}`")
    else:
        typer.echo("\n\n".join("\n".join(_text(run, one, len(found) > 1)) for one in found))


def _reports(run: Path) -> list[FoundReports]:
    """Returns the reports in the folder; raises UsageError if it is not that of a run."""
    if not (run / PLAN).is_file() and not (run / FOLDER).is_dir():
        raise UsageError("no-run", f"`{run}` is not the folder of a run", hint="give the folder, such as `runs/NAME`")
    try:
        return read(run)
    except OSError as error:
        raise UsageError("no-run", f"the reports in `{run}` cannot be read: {error.strerror or error}") from error


def _data(found: FoundReports) -> dict[str, Any]:
    return {
        "attempt": found.attempt,
        **asdict(verdict(found)),
        "evidence": evidence(found.ranks),
        "unreadable": list(found.unreadable),
    }


def _text(run: Path, found: FoundReports, has_attempts: bool) -> Iterator[str]:
    """Yields the lines of one attempt."""
    seen = verdict(found)
    if has_attempts:
        yield f"attempt {found.attempt}"
    yield from _fields(seen)
    yield "what ranks said"
    yield from (f"  {line}" for line in evidence(found.ranks))
    if found.unreadable:
        yield f"  could not be read: {', '.join(found.unreadable)}"
    yield f"stacks of all threads: {run / FOLDER / str(found.attempt)}"


def _fields(seen: Verdict) -> Iterator[str]:
    """Yields what is known of the verdict, a line for each."""
    named = ", ".join(map(str, seen.ranks)) or "nobody can be named: two ranks differ, and either may be wrong"
    shown = {
        "cause": seen.cause,
        "rank": named,
        "step": str(seen.step) if seen.step else "",
        "action": in_words(seen.action),
        "layer": seen.layer,
        "exchange": "; ".join(f"{one} (number {one.number} of `{one.queue}`)" for one in seen.exchanges),
        "remedy": seen.remedy,
    }
    yield from (f"{name:<10}{value}" for name, value in shown.items() if value)

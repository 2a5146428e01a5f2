"""`train-cli doctor RUN`: what went wrong in a run, or is slow, from what its ranks have left in its folder."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sley_core.actions.action import in_words
from sley_core.attempt import PLAN
from sley_core.errors import UsageError
from sley_doctor.reports import work_record
from sley_doctor.reports.fault_report import FoundReports, read
from sley_doctor.reports.work_record import WorkRecord
from sley_doctor.slow.judge import Judgement, judge
from sley_doctor.slow.words import cause_in_words, last_seen, nobody, remedy, work_in_words
from sley_doctor.verdict.verdict import evidence, state_in_words, state_of, verdict
from train_cli.options import FormatOption, OutputFormat
from train_cli.run_folder import FAULTS


def doctor(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, such as runs/NAME.")],
    form: FormatOption = OutputFormat.text,
) -> None:
    """Say what went wrong in a run, or which rank makes others wait: cause, rank, layer, action, remedy."""
    if not (run / PLAN).is_file() and not (run / FAULTS).is_dir():
        raise UsageError("no-run", f"`{run}` is not the folder of a run", hint="give the folder, such as `runs/NAME`")
    try:
        found, records = read(run), work_record.read(run)
        state = state_of(run, records, time.time())
    except OSError as error:
        raise UsageError("no-run", f"what is in `{run}` cannot be read: {error.strerror or error}") from error
    judged = judge(records)
    if form is OutputFormat.json:
        data = {
            "attempts": [
                {
                    "attempt": one.attempt,
                    **asdict(verdict(one)),
                    "evidence": evidence(one.ranks),
                    "unreadable": list(one.unreadable),
                }
                for one in found
            ],
            "state": asdict(state),
            "slow": [{**asdict(cause), "told": cause_in_words(cause), "remedy": remedy(cause)} for cause in judged.causes],
            "why_not": judged.why_not,
            "work": [*work_in_words(judged)],
        }
        typer.echo(json.dumps(data, indent=2))
        return
    parts = ["\n".join(_text(run, one, len(found) > 1)) for one in found]
    if not found:
        parts.append(f"no rank has reported a failure in `{run}`: {state_in_words(state, time.time())}")
    parts.append("\n".join(_slow(judged, records)))
    typer.echo("\n\n".join(parts))


def _text(run: Path, found: FoundReports, has_attempts: bool) -> Iterator[str]:
    """Yields the lines of one attempt."""
    seen = verdict(found)
    if has_attempts:
        yield f"attempt {found.attempt}"
    named = ", ".join(map(str, seen.ranks)) or "nobody can be named: two ranks differ, and either may be wrong"
    fields = {
        "cause": seen.cause,
        "rank": named,
        "step": str(seen.step) if seen.step else "",
        "action": in_words(seen.action),
        "layer": seen.layer,
        "exchange": "; ".join(f"{one} (number {one.number} of `{one.queue}`)" for one in seen.exchanges),
        "remedy": seen.remedy,
    }
    yield from (f"{name:<10}{value}" for name, value in fields.items() if value)
    yield "what ranks said"
    yield from (f"  {line}" for line in evidence(found.ranks))
    if found.unreadable:
        yield f"  could not be read: {', '.join(found.unreadable)}"
    yield f"stacks of all threads: {run / FAULTS / str(found.attempt)}"


def _slow(judged: Judgement, records: Sequence[WorkRecord]) -> Iterator[str]:
    """Yields who is slow, and what each rank works at, waits for, and when it was last seen."""
    for cause in judged.causes:
        yield f"{'slow':<10}{cause_in_words(cause)}"
        yield f"{'steps':<10}{cause.first} to {cause.last}"
        yield f"{'remedy':<10}{remedy(cause)}"
    if not judged.causes:
        yield f"{'slow':<10}{nobody(judged)}"
    if lines := [*work_in_words(judged)] or [*last_seen(records)]:
        yield "what ranks worked at and waited for"
        yield from (f"  {line}" for line in lines)

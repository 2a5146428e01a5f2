"""Implements `train-cli doctor RUN`, which explains why a run failed or is slow, and `train-cli report RUN...`, which writes
one self-contained HTML page about one or more runs. Both commands read the files that the ranks left in the run's folder.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from sley_core.actions.action import describe_action
from sley_core.errors import PluginError, UsageError, install_hint
from sley_core.files import PLAN_FILE, write_atomically
from sley_doctor.fault_report import AttemptReports, read_reports
from sley_doctor.slow_ranks import Judgement, describe_cause, describe_no_cause, describe_work, find_remedy, judge
from sley_doctor.verdict import describe_report, describe_state, find_run_state, find_verdict
from sley_doctor.work_record import read_records
from train_cli.console import FormatOption, OutputFormat, print_line
from train_cli.run_folder import FAULTS


def doctor(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, such as runs/NAME.")],
    output_format: FormatOption = OutputFormat.text,
) -> None:
    """Show why a run failed, or which rank makes other ranks wait: cause, rank, layer, action, remedy."""
    if not (run / PLAN_FILE).is_file() and not (run / FAULTS).is_dir():
        raise UsageError("no-run", f"`{run}` is not the folder of a run", hint="pass the folder, such as `runs/NAME`")
    try:
        attempts, records = read_reports(run), read_records(run)
        state = find_run_state(run, records, time.time())
    except OSError as error:
        raise UsageError("no-run", f"the files in `{run}` cannot be read: {error.strerror or error}") from error
    judgement = judge(records)
    if output_format is OutputFormat.json:
        data = {
            "attempts": [
                {
                    "attempt": reports.attempt,
                    **asdict(find_verdict(reports)),
                    "evidence": [*map(describe_report, reports.ranks)],
                    "unreadable": list(reports.unreadable),
                }
                for reports in attempts
            ],
            "state": asdict(state),
            "slow": [
                {**asdict(cause), "description": describe_cause(cause), "remedy": find_remedy(cause)}
                for cause in judgement.causes
            ],
            "why_not": judgement.no_cause_reason,
            "work": [*describe_work(judgement)],
        }
        typer.echo(json.dumps(data, indent=2))
        return
    paragraphs = ["\n".join(_format_attempt(run, reports, len(attempts) > 1)) for reports in attempts]
    if not attempts:
        paragraphs.append(f"no rank has reported a failure in `{run}`: {describe_state(state, time.time())}")
    paragraphs.append("\n".join(_format_causes(judgement)))
    typer.echo("\n\n".join(paragraphs))


def _format_attempt(run: Path, reports: AttemptReports, has_attempts: bool) -> Iterator[str]:
    """Yields the lines about one attempt of the run in folder `run`. has_attempts: whether the run has several attempts."""
    result = find_verdict(reports)
    if has_attempts:
        yield f"attempt {reports.attempt}"
    ranks = ", ".join(map(str, result.ranks)) or "unknown: two ranks differ, and either may be wrong"
    fields = {
        "cause": result.cause,
        "rank": ranks,
        "step": str(result.step) if result.step else "",
        "action": describe_action(result.action),
        "layer": result.layer,
        "exchange": "; ".join(f"{exchange} (number {exchange.number} of `{exchange.queue}`)" for exchange in result.exchanges),
        "remedy": result.remedy,
    }
    yield from (f"{name:<10}{value}" for name, value in fields.items() if value)
    yield "reports of ranks"
    yield from (f"  {describe_report(report)}" for report in reports.ranks)
    if reports.unreadable:
        yield f"  could not be read: {', '.join(reports.unreadable)}"
    yield f"stacks of all threads: {run / FAULTS / str(reports.attempt)}"


def _format_causes(judgement: Judgement) -> Iterator[str]:
    """Yields lines about each cause of slow steps, then a line about the work and the waits of each rank."""
    for cause in judgement.causes:
        yield f"{'slow':<10}{describe_cause(cause)}"
        yield f"{'steps':<10}{cause.first} to {cause.last}"
        yield f"{'remedy':<10}{find_remedy(cause)}"
    if not judgement.causes:
        yield f"{'slow':<10}{describe_no_cause(judgement)}"
    if lines := [*describe_work(judgement)]:
        yield "work and waits of each rank in a step"
        yield from (f"  {line}" for line in lines)


REPORT_NAME = "report.html"  # the default name of a report
_REQUIRED_MODULES = ("matplotlib", "jinja2")  # the modules that a report needs, in the `report` extra of sley-doctor


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs: runs/NAME.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help=f"The file to write; by default {REPORT_NAME} in the run folder, or in the current folder for several runs.",
        ),
    ] = None,
) -> None:
    """Write one HTML page about runs: curves, waits, memory, counts, the plan with the origins of its values, the machine."""
    if missing := [name for name in _REQUIRED_MODULES if find_spec(name) is None]:
        raise PluginError(
            "report-missing",
            f"a report needs modules that are not installed: {' and '.join(f'`{name}`' for name in missing)}",
            hint=install_hint("doctor", "report"),
        )
    from sley_doctor.report_page import read_runs, render_page

    recorded_runs = read_runs(runs)
    file = out or (runs[0] / REPORT_NAME if len(runs) == 1 else Path(REPORT_NAME))
    text = render_page(recorded_runs)
    try:
        write_atomically(file, text)
    except OSError as error:
        message = f"cannot write `{file}`: {error.strerror or error}"
        raise UsageError("report-file", message, hint="use another `--out`") from error
    print_line(f"wrote {file}: {len(text.encode()) / 1e3:.0f} kB")

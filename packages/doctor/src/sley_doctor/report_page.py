"""Renders the report page from the records of runs with the template `report_page.html.jinja`. matplotlib draws the charts.

A section that would be empty states why.
"""

import io
import json
import math
from base64 import b64encode
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import matplotlib as mpl
import tomli
from cycler import cycler
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sley_core.errors import UsageError, format_path
from sley_core.files import PLAN_FILE
from sley_core.plan.plan import format_value, iterate_values
from sley_core.run_folder import read_rows
from sley_doctor.fault_report import AttemptReports, read_reports
from sley_doctor.slow_ranks import describe_cause, describe_no_cause, describe_work, find_remedy, judge
from sley_doctor.verdict import find_verdict
from sley_doctor.work_record import WorkRecord, read_records
from train_cli.console import format_bytes
from train_cli.environment import StartRecord, read_start_record
from train_cli.saved_run import SUMMARY

Row = Mapping[str, float | int | None]


@dataclass(frozen=True)
class RecordedRun:
    """The records of one run. label: the run's name, or its folder if another run in the report has the same name. rows: one
    row of metrics per optimizer step; a value that was not finite is None. values: the values of the resolved plan, as TOML, by
    key. start: the start record; None if there is none. summary: the summary; None if the run has not written one. faults: the
    reports of each failed attempt. work: the work records of the last start, in order of rank.
    """

    label: str
    folder: Path
    rows: Sequence[Row]
    values: Mapping[str, str]
    start: StartRecord | None
    summary: Mapping[str, Any] | None
    faults: Sequence[AttemptReports]
    work: Sequence[WorkRecord]


def read_runs(folders: Sequence[Path]) -> list[RecordedRun]:
    """Returns the runs in `folders`. Raises UsageError "no-run" if a folder contains no run, or if its files cannot be read."""
    runs = []
    for folder in folders:
        try:
            plan = tomli.loads((folder / PLAN_FILE).read_text("utf-8"))
            has_summary = (folder / SUMMARY).exists()
            run = RecordedRun(
                str(plan.get("run", {}).get("name", folder.name)),
                folder,
                list(read_rows(folder)),
                {format_path(path): format_value(value) for path, value in iterate_values(plan)},
                read_start_record(folder),
                json.loads((folder / SUMMARY).read_text("utf-8")) if has_summary else None,
                read_reports(folder),
                read_records(folder),
            )
        except (OSError, ValueError, KeyError) as error:
            reason = f"its files cannot be read: {error}" if (folder / PLAN_FILE).exists() else f"it has no `{PLAN_FILE}`"
            message = f"`{folder}` is not the folder of a run: {reason}"
            raise UsageError("no-run", message, hint="pass the folder, such as `runs/NAME`") from error
        runs.append(run)
    names = Counter(run.label for run in runs)
    return [run if names[run.label] == 1 else replace(run, label=str(run.folder)) for run in runs]


MAX_RANKS = 32  # the maximum number of ranks in the section about waits


def build_waiting_section(label: str, records: Sequence[WorkRecord]) -> dict[str, Any]:
    """Returns the template's values for the section about waits in one run, with lines for the first MAX_RANKS ranks."""
    judgement = judge(records)
    descriptions = [f"{describe_cause(cause)}; {find_remedy(cause)}" for cause in judgement.causes] or [
        describe_no_cause(judgement)
    ]
    lines = list(describe_work(judgement))
    note = f"The first {MAX_RANKS} of {len(lines)} ranks." if len(lines) > MAX_RANKS else ""
    return {"label": label, "descriptions": descriptions, "lines": lines[:MAX_RANKS], "note": note}


_CURVES = {
    "loss": ("Loss", "as defined by the plan's [loss], mean over a step", "loss"),
    "held_out_loss": ("Held-out loss", "on data that is not trained on", "loss"),
    "lr": ("Learning rate", "", "rate"),
    "grad_norm": ("Gradient norm", "before clipping", "norm"),
    "tokens_per_s": ("Speed", "sum over all ranks", "tokens/s"),
    "samples_per_s": ("Speed", "sum over all ranks", "samples/s"),
    "tflops": ("TFLOP/s", "per device, for the model's forward and backward", "TFLOP/s"),
    "mfu": ("MFU", "model FLOPs utilization: the share of the devices' peak", "of 1"),
    "memory_mb": ("Memory", "peak so far on rank 0: tensors on a GPU, the whole process on a CPU", "MiB"),
    "data_wait_s": ("Waiting for data", "on rank 0 in each step", "s"),
}
"""The title, note and unit of each metric whose chart comes first. Charts of other metrics follow, titled with their names."""

_MAX_CHARTS = 24  # the maximum number of charts; other metrics are only named, since a plugin may add one for each layer
_NO_CURVES = frozenset({"step", "tokens", "trained_tokens", "samples", "seconds"})  # metrics without a chart of their own


class TableRow(NamedTuple):
    """A row of a table, with one value per run; "" stands for no value. differs: whether the values differ."""

    key: str
    values: Sequence[Any]
    differs: bool


def render_page(runs: Sequence[RecordedRun]) -> str:
    """Returns the report about `runs` as a self-contained HTML page."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"bytes": format_bytes, "number": _format_number}
    template = environment.from_string(resources.files(__package__).joinpath("report_page.html.jinja").read_text("utf-8"))

    names = _list_chart_names(runs)
    summaries = [run.summary or {} for run in runs]
    return template.render(
        runs=runs,
        title=", ".join(run.label for run in runs),
        summary=_build_table_rows(list(map(_list_summary_values, runs))),
        verdicts=[(run.label, reports.attempt, find_verdict(reports)) for run in runs for reports in run.faults],
        charts=[_draw_chart(runs, name) for name in names[:_MAX_CHARTS]],
        hidden_metrics=names[_MAX_CHARTS:],
        waiting=[build_waiting_section(run.label, run.work) for run in runs],
        memory=_build_table_rows([summary.get("memory_bytes", {}) for summary in summaries]),
        counts=_build_table_rows(
            [
                {f"{part}: {key}": value for part, values in summary.get("counts", {}).items() for key, value in values.items()}
                for summary in summaries
            ]
        ),
        plan=_build_table_rows([run.values for run in runs]),
        origins=[run.start.origins if run.start else {} for run in runs],
        machine=_build_table_rows(
            [run.start.machine if run.start else (run.summary or {}).get("versions", {}) for run in runs]
        ),
    )


def _list_summary_values(run: RecordedRun) -> dict[str, Any]:
    """Returns the numbers and texts of the run's summary by name, or its outcome and number of steps if there is no summary."""
    if run.summary is None:
        return {"outcome": "failed" if run.faults else "not ended", "steps": len(run.rows)}
    values = {name: value for name, value in run.summary.items() if isinstance(value, int | float | str)}
    return {**values, "notes": "; ".join(run.summary["notes"])}


def _list_chart_names(runs: Sequence[RecordedRun]) -> list[str]:
    """Returns the names of all recorded metrics that get a chart, the metrics in `_CURVES` first."""
    recorded = dict.fromkeys(name for run in runs for row in run.rows for name in row)
    return [name for name in {**_CURVES, **recorded} if name in recorded and name not in _NO_CURVES]


def _draw_chart(runs: Sequence[RecordedRun], name: str) -> tuple[str, str, str]:
    """Returns the title and the note of the metric `name`, and its chart as a PNG image in a data URI. Values that were not
    finite are gaps in the line.
    """
    title, note, unit = _CURVES.get(name, (name, "", ""))
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(6.0, 3.0), layout="constrained")
        axes = figure.add_subplot(xlabel="step", ylabel=unit)
        for run in runs:
            rows = [row for row in run.rows if name in row]
            steps = [float(row["step"] or 0) for row in rows]
            values = [math.nan if value is None else float(value) for value in (row[name] for row in rows)]
            axes.plot(steps, values, linewidth=1.2, marker="." if len(rows) < 30 else None, label=run.label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(runs) > 1:
            axes.legend()
        image = io.BytesIO()
        figure.savefig(image, format="png", transparent=True)
    return title, note, f"data:image/png;base64,{b64encode(image.getvalue()).decode()}"


def _build_table_rows(columns: Sequence[Mapping[str, Any]]) -> list[TableRow]:
    """Returns a row for each key in any of `columns`, in order of first appearance. columns: each run's values by key."""
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = [(key, [column.get(key, "") for column in columns]) for key in keys]
    return [TableRow(key, values, any(value != values[0] for value in values)) for key, values in rows]


def _format_number(value: Any) -> str:
    return f"{value:,.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.prop_cycle": cycler(linestyle=["-", "--", ":"]) * mpl.rcParamsDefault["axes.prop_cycle"],
    "savefig.dpi": 150,
}
"""The style of all charts. The lines of up to 30 runs look different."""

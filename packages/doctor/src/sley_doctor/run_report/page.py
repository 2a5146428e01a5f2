"""Renders the page: sections from what runs have recorded, filled into `page.html.jinja`.

A section without content stands there with the reason, so that nobody looks for what was never recorded.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import tomli

from sley_core.attempt import PLAN
from sley_core.errors import UsageError, format_path
from sley_core.metrics.jsonl import rows
from sley_core.plan.write import format_value, iterate_values
from sley_doctor.reports.fault_report import FoundReports
from sley_doctor.reports.fault_report import read as read_faults
from sley_doctor.reports.work_record import DATA, DEVICE, UPDATE, WorkRecord
from sley_doctor.reports.work_record import read as read_work
from sley_doctor.run_report.charts import MAX_RUNS, Curve, chart, look
from sley_doctor.slow.blocks import Block, middle
from sley_doctor.slow.judge import judge
from sley_doctor.slow.words import SHOWN_S, cause_in_words, nobody, remedy, waits_of
from sley_doctor.verdict.verdict import verdict
from train_cli.progress import SUMMARY, duration, memory_of, rate
from train_cli.surroundings import StartRecord, read_start

Row = Mapping[str, float | int | None]


@dataclass(frozen=True)
class RecordedRun:
    """One run. label: its name, or its folder where another run of the report has that name.

    rows: one per optimizer step; a number that was not finite is None. values: of the plan as resolved, as TOML by key. start:
    None for a run that left no record of it. summary: None while it has not ended. faults: one per attempt that failed. work:
    by rank, of its last start.
    """

    label: str
    folder: Path
    rows: Sequence[Row]
    values: Mapping[str, str]
    start: StartRecord | None
    summary: Mapping[str, Any] | None
    faults: Sequence[FoundReports]
    work: Sequence[WorkRecord]


def read_runs(folders: Sequence[Path]) -> list[RecordedRun]:
    """Returns the runs in `folders`, in that order. Raises UsageError "no-run" for a folder that has none, or is unreadable."""
    runs = []
    for folder in folders:
        try:
            plan = tomli.loads((folder / PLAN).read_text("utf-8"))
            has_summary = (folder / SUMMARY).exists()
            run = RecordedRun(
                str(plan.get("run", {}).get("name", folder.name)),
                folder,
                list(rows(folder)),
                {format_path(path): format_value(value) for path, value in iterate_values(plan)},
                read_start(folder),
                json.loads((folder / SUMMARY).read_text("utf-8")) if has_summary else None,
                read_faults(folder),
                read_work(folder),
            )
        except (OSError, ValueError, KeyError) as error:
            why = f"what it holds cannot be read: {error}" if (folder / PLAN).exists() else f"it has no `{PLAN}`"
            message = f"`{folder}` is not the folder of a run: {why}"
            raise UsageError("no-run", message, hint="give the folder: `runs/NAME`") from error
        runs.append(run)
    names = Counter(run.label for run in runs)
    return [run if names[run.label] == 1 else replace(run, label=str(run.folder)) for run in runs]


KINDS: Mapping[str, str] = {DATA: "data", "F": "forward", "BI": "backward", "W": "backward for weights", UPDATE: "update"}
"""Places that a column adds up, by name or by the first letter of actions; what is left is the column `else`."""

MOST_RANKS = 32


def waiting(label: str, records: Sequence[WorkRecord]) -> dict[str, Any]:
    """Returns who waited for whom in a run whose ranks have left `records`: causes in words, with what to do, or that there is
    none; and a row for each rank, those first that wait least.
    """
    judged = judge(records)
    told = [f"{cause_in_words(cause)}; {remedy(cause)}" for cause in judged.causes] or [nobody(judged)]
    blocks = judged.blocks
    rows = sorted((_row(rank, blocks) for rank in blocks[0].ranks), key=lambda row: row["waiting_s"]) if blocks else []
    note = f"Of {len(rows)} ranks the {MOST_RANKS} that wait least." if len(rows) > MOST_RANKS else ""
    return {"label": label, "told": told, "rows": rows[:MOST_RANKS], "note": note}


def _row(rank: int, blocks: Sequence[Block]) -> dict[str, Any]:
    """Returns one rank's row of the table: seconds of work by kind, and what is left; seconds of waiting; the longest waits."""
    own = [block.ranks[rank] for block in blocks]
    names = [place for place in own[-1].work if place != DEVICE]
    places = {place: middle(one.work[place].middle for one in own if place in one.work) for place in names}
    kinds = [
        sum(seconds for place, seconds in places.items() if place == kind or (kind.isupper() and place[0] in kind))
        for kind in KINDS
    ]
    waits = waits_of(rank, blocks)
    return {
        "rank": rank,
        "stage": own[0].start.stage,
        "work": [*kinds, sum(places.values()) - sum(kinds)],
        "waiting_s": sum(seconds for seconds, _ in waits),
        "waits": [f"{seconds * 1e3:.3g} ms {words}" for seconds, words in waits[:2] if seconds >= SHOWN_S],
    }


MAX_BYTES = 1_000_000

_MOST_POINTS = 12_000  # of all curves together, some 25 bytes each

_CURVES = {
    "loss": ("Loss", "as the plan's [loss] says, mean of a step", "loss"),
    "held_out_loss": ("Held-out loss", "of data that is not trained on", "loss"),
    "lr": ("Learning rate", "", "rate"),
    "grad_norm": ("Gradient norm", "before clipping", "norm"),
    "tokens_per_s": ("Speed", "of all ranks together", "tokens/s"),
    "samples_per_s": ("Speed", "of all ranks together", "samples/s"),
    "tflops": ("TFLOP/s", "of one device, of the model's forward and backward", "TFLOP/s"),
    "mfu": ("MFU", "model FLOPs utilisation: the share of what the devices can do", "of 1"),
    "memory_mb": ("Memory", "peak so far of rank 0: of its tensors on a GPU, of its whole process on a CPU", "MiB"),
    "data_wait_s": ("Waiting for data", "of rank 0 in each step", "s"),
}
"""The numbers of a metrics row that come first, with title, explanation and unit; others follow under their own names."""

_MOST_CHARTS = 24  # a plugin may add a number for each layer
_NO_CURVES = frozenset({"step", "tokens", "trained_tokens", "samples", "seconds"})  # the speed says as much of a step already

_FACTS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "outcome": lambda one: one["outcome"],
    "steps": lambda one: f"{one['steps']:,}" + (f", {one['skipped_steps']} skipped" if one["skipped_steps"] else ""),
    "stopped early": lambda one: one.get("stopped_early") or "",
    "final loss": lambda one: _number(one["final_loss"]),
    "held-out loss": lambda one: _number(one["held_out_loss"]),
    "samples": lambda one: f"{one['samples']:,}",
    "tokens": lambda one: f"{one['tokens']:,}" if one["tokens"] else "",
    "trained tokens": lambda one: f"{one['trained_tokens']:,}" if one.get("trained_tokens") else "",
    "time in steps": lambda one: duration(one["seconds"]),
    "speed": rate,
    "parameters": lambda one: f"{one['parameters']:,}",
    "ranks": lambda one: str(one["world"]),
    "device": lambda one: one["device"],
    "notes": lambda one: "; ".join(one["notes"]),
}
"""What the first table says, of a run's `summary.json`."""


class TableRow(NamedTuple):
    """A row of a table with a column for each run; `values` has "" where a run has none."""

    key: str
    values: Sequence[Any]
    differs: bool


def page(runs: Sequence[RecordedRun]) -> str:
    """Returns the HTML of a report on `runs`, which asks for no other file and no network. Raises UsageError "report-size" for
    more than MAX_RUNS runs, or where they would make it larger than MAX_BYTES.
    """
    if len(runs) > MAX_RUNS:
        raise _too_much(f"a report shows {MAX_RUNS} runs at most, and these are {len(runs)}")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"ms": lambda seconds: f"{seconds * 1e3:.4g}", "bytes": _bytes, "number": _number}
    template = environment.from_string(resources.files(__package__).joinpath("page.html.jinja").read_text("utf-8"))

    def fact(run: RecordedRun, name: str) -> str:
        if run.summary is None:
            return {"outcome": "failed" if run.faults else "not ended", "steps": f"{len(run.rows):,}"}.get(name, "")
        return _FACTS[name](run.summary)

    names = _numbers(runs)
    summaries = [run.summary or {} for run in runs]
    text = template.render(
        runs=runs,
        title=", ".join(run.label for run in runs),
        facts=[(name, [fact(run, name) for run in runs]) for name in _FACTS],
        verdicts=[(run.label, found.attempt, verdict(found)) for run in runs for found in run.faults],
        looks=[look(number) for number in range(len(runs))],
        charts=list(_charts(runs, names[:_MOST_CHARTS])),
        numbers_left_out=names[_MOST_CHARTS:],
        waiting=[waiting(run.label, run.work) for run in runs],
        kinds=list(KINDS.values()),
        memory=_table([one.get("memory_bytes", {}) for one in summaries]),
        counts=_table([_flat(one.get("counts", {})) for one in summaries]),
        plan=_table([run.values for run in runs]),
        origins=[run.start.origins if run.start else {} for run in runs],
        machine=_table([run.start.machine if run.start else (run.summary or {}).get("versions", {}) for run in runs]),
    )
    if (size := len(text.encode())) > MAX_BYTES:
        raise _too_much(f"the report would have {size:,} bytes, more than {MAX_BYTES:,}")
    return text


def _too_much(message: str) -> UsageError:
    return UsageError("report-size", message, hint="name fewer runs")


def _numbers(runs: Sequence[RecordedRun]) -> list[str]:
    """Returns the numbers that rows have, those of _CURVES first; of the two speeds, only what was counted; FLOP/s if known."""
    recorded = dict.fromkeys(key for run in runs for row in run.rows[-1:] for key in row)
    speeds = {"tokens_per_s", "samples_per_s"}
    left_out = _NO_CURVES | (speeds - (speeds & recorded.keys() or {"tokens_per_s"})) | ({"tflops", "mfu"} - recorded.keys())
    return [name for name in {**dict.fromkeys(_CURVES), **recorded} if name not in left_out]


def _charts(runs: Sequence[RecordedRun], names: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yields title, note and `<svg>` of a chart for each of `names`; "" where no run has recorded the number."""
    most = max(30, _MOST_POINTS // (len(names) * len(runs)))
    for name in names:
        title, note, unit = _CURVES.get(name, (name, "", ""))
        curves = []
        for number, run in enumerate(runs):
            if known := [row for row in run.rows if name in row]:
                curves.append(Curve(number, [int(row["step"] or 0) for row in known], [row[name] for row in known]))
        if any(len(curve.steps) > most for curve in curves):
            note += f"{'; ' if note else ''}of each stretch of steps the lowest and the highest"
        yield title, note, chart(name, unit, curves, most) if curves else ""


def _table(columns: Sequence[Mapping[str, Any]]) -> list[TableRow]:
    """Returns a row for each key of any column, in the order of their first appearance."""
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = [(key, [column.get(key, "") for column in columns]) for key in keys]
    return [TableRow(key, values, any(value != values[0] for value in values)) for key, values in rows]


def _flat(counts: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {f"{part}: {key}": value for part, values in counts.items() for key, value in values.items()}


def _bytes(count: Any) -> str:
    return memory_of(count) if isinstance(count, int) else ""


def _number(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)

"""Reads what a run has left in its folder, for its report, from files alone: needs neither the plan's plugins nor torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli

from sley_core.actions.timeline import Timeline
from sley_core.errors import UsageError, dotted
from sley_core.metrics.jsonl import rows
from sley_core.metrics.summary import NAME as SUMMARY
from sley_core.plan.write import inline, leaves
from sley_core.run_files import PLAN
from sley_doctor.reports.fault_report import FoundReports
from sley_doctor.reports.fault_report import read as read_faults
from sley_doctor.reports.work_record import WorkRecord
from sley_doctor.reports.work_record import read as read_work
from sley_doctor.run_report.drawn_step import TRACE, read_trace
from train_cli.start_record import StartRecord, read_start

Row = Mapping[str, float | int | None]


@dataclass(frozen=True)
class RecordedRun:
    """One run. label: its name, or its folder where another run of the report has that name.

    rows: one per optimizer step; a number that was not finite is None. values: of the plan as resolved, as TOML by key. start:
    None for a run that left no record of it. summary: None while it has not ended. timelines: of one step by title, measured
    ones first; empty where the plan asked for none. faults: one per attempt that failed. work: by
    rank, of its last start.
    """

    label: str
    folder: Path
    rows: Sequence[Row]
    values: Mapping[str, str]
    start: StartRecord | None
    summary: Mapping[str, Any] | None
    timelines: Mapping[str, Timeline]
    faults: Sequence[FoundReports]
    work: Sequence[WorkRecord]


def read_runs(folders: Sequence[Path]) -> list[RecordedRun]:
    """Returns the runs in `folders`, in that order. Raises UsageError "no-run" for a folder that has none, or is unreadable."""
    plans = [_plan(folder) for folder in folders]
    names = [str(plan.get("run", {}).get("name", folder.name)) for plan, folder in zip(plans, folders, strict=True)]
    labels = [name if names.count(name) == 1 else str(folder) for name, folder in zip(names, folders, strict=True)]
    return [_run(*one) for one in zip(labels, folders, plans, strict=True)]


def _plan(folder: Path) -> dict[str, Any]:
    """Returns the plan in a run's folder as plain data; raises an error if there is none."""
    try:
        return tomli.loads((folder / PLAN).read_text("utf-8"))
    except FileNotFoundError:
        raise _no_run(folder, f"it has no `{PLAN}`") from None
    except (OSError, ValueError) as error:
        raise _no_run(folder, f"its `{PLAN}` cannot be read: {error}") from error


def _run(label: str, folder: Path, plan: Mapping[str, Any]) -> RecordedRun:
    try:
        return RecordedRun(
            label,
            folder,
            list(rows(folder)),
            {dotted(path): inline(value) for path, value in leaves(plan)},
            read_start(folder),
            json.loads((folder / SUMMARY).read_text("utf-8")) if (folder / SUMMARY).exists() else None,
            read_trace(folder / TRACE) if (folder / TRACE).exists() else {},
            read_faults(folder),
            read_work(folder),
        )
    except (OSError, ValueError, KeyError) as error:
        raise _no_run(folder, f"what it holds cannot be read: {error}") from error


def _no_run(folder: Path, why: str) -> UsageError:
    return UsageError("no-run", f"`{folder}` is not the folder of a run: {why}", hint="give the folder: `runs/NAME`")

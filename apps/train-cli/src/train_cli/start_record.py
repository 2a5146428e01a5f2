"""Writes and reads `start.json` in a run's folder: when and on what rank 0 was started, and the origin of each value of its
plan.

The resolved plan beside it has the values. A run that resumes writes the record anew.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sley_core.errors import dotted
from sley_core.json_text import write_json
from sley_core.plan.write import leaves
from train_cli.machine_facts import machine_facts

if TYPE_CHECKING:
    from sley_core.plan.plan import Plan

NAME = "start.json"


@dataclass(frozen=True)
class StartRecord:
    """Holds the record of one start.

    time: UTC, in ISO 8601. origins: of each key of the plan (`run.steps`), file and line, `--set #1` or default. machine:
    what `train-cli env` prints, by name.
    """

    time: str
    origins: dict[str, str]
    machine: dict[str, Any]


def write_start(folder: Path, plan: Plan, *, names_gpus: bool) -> None:
    """Writes the record of a start that happens now. plan: resolved by the run. names_gpus: as of `machine_facts`."""
    time = datetime.now(UTC).isoformat(timespec="seconds")
    origins = {dotted(path): plan.origin(path) for path, _ in leaves(plan.tables)}
    record = StartRecord(time, origins, machine_facts(names_gpus=names_gpus))
    write_json(folder / NAME, vars(record))


def read_start(folder: Path) -> StartRecord | None:
    """Returns the record of the last start; None in a folder without one. Raises OSError, and ValueError for another file."""
    path = folder / NAME
    if not path.exists():
        return None
    try:
        return StartRecord(**json.loads(path.read_text("utf-8")))
    except TypeError as error:
        raise ValueError(f"`{path}` is not as a run writes it") from error

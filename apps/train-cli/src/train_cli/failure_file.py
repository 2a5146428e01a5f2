"""The report of a failing rank: a file that torchrun and our own launcher both read.

The file is elastic's own (its path comes in TORCHELASTIC_ERROR_FILE, its form is that of elastic's `record`), so that
torchrun names the rank that failed first; under the key `sley` it has the diagnostics, which our launcher shows once.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sley_core.errors import EXIT_RUN_FAILED, Diagnostic, Place
from sley_core.json_text import write_whole
from train_cli.faults import Fault, place_of, steps_of

_FILE = "TORCHELASTIC_ERROR_FILE"
_KEY = "sley"

_AFTERMATH = frozenset({"collective-failed", "rendezvous-failed", "group-failed", "start-failed"})
"""Codes that ranks report when a peer is gone."""

_AFTERMATH_S = 10
"""Seconds added to the time of such a report for torchrun: it shows the rank that failed first, by whole seconds, and
notices a death only after the dead rank's peers have reported."""

_LATE, _WAITING = "rank-late", "rank-waiting"


@dataclass(frozen=True)
class Report:
    """Holds how a rank failed, and when (seconds since the epoch)."""

    fault: Fault
    time: float


def write(fault: Fault) -> None:
    """Writes the report of this rank, unless no launcher asked for one or one exists already: the first reason counts.

    The file is written in full or not at all. Its folder is made again if it was removed.
    """
    name = os.environ.get(_FILE)
    if not name or Path(name).exists():
        return
    now = time.time()
    message = "\n".join(str(diagnostic) for diagnostic in fault.diagnostics)
    # torchrun shows the call stack, and the message only where there is none.
    stack = fault.trace if fault.unexpected else message
    at = int(now) + (_AFTERMATH_S if is_aftermath(fault) else 0)
    content = {
        "message": {"message": message, "extraInfo": {"py_callstack": stack, "timestamp": str(at)}},
        _KEY: {"fault": asdict(fault), "time": now},
    }
    with contextlib.suppress(OSError):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(Path(name), json.dumps(content))


def write_late() -> Diagnostic:
    """Writes the report of a rank that was asked to end and cannot, and returns it: it names where the main thread is now."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    steps = steps_of(frame)
    ours = [name for step in steps if (name := step.f_globals.get("__name__", "")).startswith("sley_core.")]
    waits = bool(ours) and ours[-1].startswith("sley_core.comm.")  # the innermost: a run's methods are called by a device's
    place, line = place_of(steps)
    where = f"it was at {place.file}:{place.line}" if place else "it was busy"
    trace = "".join(traceback.format_stack(frame)) if frame else ""
    found = Diagnostic(_WAITING if waits else _LATE, where, place=place, source_line=line)
    write(Fault((found,), EXIT_RUN_FAILED, trace))
    return found


def is_aftermath(fault: Fault) -> bool:
    """Returns whether a rank's fault only reports that peers had ended."""
    return any(each.code in _AFTERMATH for each in fault.diagnostics)


def is_late(fault: Fault) -> bool:
    """Returns whether the report was written by `write_late`."""
    return fault.diagnostics[:1] != () and fault.diagnostics[0].code in (_LATE, _WAITING)


def is_waiting(fault: Fault) -> bool:
    """Returns whether a rank that `write_late` reported was waiting for peers."""
    return fault.diagnostics[0].code == _WAITING


def read(content: Mapping[str, Any]) -> Report | None:
    """Returns the report in a file's content, or None if that is not of this program."""
    written = content.get(_KEY)
    if written is None:
        return None
    fault = written["fault"]
    diagnostics = tuple(_diagnostic(fields) for fields in fault["diagnostics"])
    return Report(Fault(**{**fault, "diagnostics": diagnostics}), written["time"])


def _diagnostic(fields: dict[str, Any]) -> Diagnostic:
    place = Place(**fields["place"]) if fields["place"] else None
    return Diagnostic(**{**fields, "path": tuple(fields["path"]), "place": place})

"""What a failing rank leaves for whoever started it: a file that torchrun and our own launcher both read.

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
from sley_core.metrics.json_text import write_whole
from train_cli.faults import Fault, place_of, steps_of

_FILE = "TORCHELASTIC_ERROR_FILE"
_KEY = "sley"

_AFTERMATH = frozenset({"collective-failed", "rendezvous-failed", "group-failed", "start-failed"})
"""What ranks report when another one is gone."""

_AFTERMATH_S = 10
"""By how much torchrun is told a later time of such a report: it shows whoever failed first, by whole seconds, and notices
a death only after the peers of the dead have spoken."""

_LATE, _WAITING = "rank-late", "rank-waiting"


@dataclass(frozen=True)
class Report:
    """How a rank failed, and when (seconds since the epoch)."""

    fault: Fault
    time: float


def write(fault: Fault) -> None:
    """Leaves the report of this rank, unless nobody asked for one, or there is one already: the first reason counts.

    The file is there whole or not at all. Its folder is made again where somebody has removed it.
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


def write_late() -> None:
    """Leaves the report of a rank that was asked to end and cannot: where its main thread is."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    steps = steps_of(frame)
    waits = any(step.f_globals.get("__name__", "").startswith("sley_core.comm.") for step in steps)
    place, line = place_of(steps)
    where = f"it was at {place.file}:{place.line}" if place else "it was busy"
    trace = "".join(traceback.format_stack(frame)) if frame else ""
    found = Diagnostic(_WAITING if waits else _LATE, where, place=place, source_line=line)
    write(Fault((found,), EXIT_RUN_FAILED, trace))


def is_aftermath(fault: Fault) -> bool:
    """Whether a rank only says that others were not there any more."""
    return any(each.code in _AFTERMATH for each in fault.diagnostics)


def is_late(fault: Fault) -> bool:
    """Whether it is the report of `write_late`."""
    return fault.diagnostics[:1] != () and fault.diagnostics[0].code in (_LATE, _WAITING)


def is_waiting(fault: Fault) -> bool:
    """Whether a late rank waited for others."""
    return fault.diagnostics[0].code == _WAITING


def read(content: Mapping[str, Any]) -> Report | None:
    """The report in a file's content; None if another program wrote it, or none did."""
    written = content.get(_KEY)
    if written is None:
        return None
    fault = written["fault"]
    diagnostics = tuple(_diagnostic(fields) for fields in fault["diagnostics"])
    return Report(Fault(**{**fault, "diagnostics": diagnostics}), written["time"])


def _diagnostic(fields: dict[str, Any]) -> Diagnostic:
    place = Place(**fields["place"]) if fields["place"] else None
    return Diagnostic(**{**fields, "path": tuple(fields["path"]), "place": place})

"""What a failing rank leaves for whoever started it: a file that torchrun and our own launcher both read.

The file is elastic's own (its path comes in TORCHELASTIC_ERROR_FILE, its form is that of elastic's `record`), so that
torchrun names the rank that failed first; under the key `sley` it has the diagnostics, which our launcher shows once.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sley_core.errors import Diagnostic, Place
from train_cli.faults import Fault

_FILE = "TORCHELASTIC_ERROR_FILE"
_KEY = "sley"


@dataclass(frozen=True)
class Report:
    """How a rank failed, and when (seconds since the epoch)."""

    fault: Fault
    time: float


def write(fault: Fault) -> None:
    """Leaves the report of this rank, unless nobody asked for one, or there is one already: the first reason counts."""
    path = os.environ.get(_FILE)
    if not path or Path(path).exists():
        return
    now = time.time()
    message = "\n".join(str(diagnostic) for diagnostic in fault.diagnostics)
    # torchrun shows the call stack, and the message only where there is none.
    stack = fault.trace if fault.unexpected else message
    content = {
        "message": {"message": message, "extraInfo": {"py_callstack": stack, "timestamp": str(int(now))}},
        _KEY: {"fault": asdict(fault), "time": now},
    }
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps(content), "utf-8")


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

"""Why a command failed, as diagnostics: the user's fault, that of code which the plan names, the world's, or ours."""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from sley_core.errors import EXIT_RUN_FAILED, Diagnostic, Place, SleyError

_OWN = frozenset({"sley_core", "sley_dp", "sley_pp", "sley_isp", "sley_memory", "train_cli"})
_BELOW = frozenset({"torch", "numpy", "pydantic", "pydantic_core", "pluggy", "tomli", "tomli_w", "packaging"})
_ABOVE = frozenset({"typer", "rich", "click", "__main__"})
"""Code in these, or in Python's own library, runs on behalf of whoever called it."""

BUG_HINT = "this is a bug in Sley: please report it with the output of `train-cli env`; `--traceback` shows where it is"


@dataclass(frozen=True)
class Fault:
    """What to tell the user and what to exit with. No diagnostics: there is nothing to add, as after Ctrl-C.

    trace: the whole chain of the error; worth showing unasked only where it was `unexpected`.
    """

    diagnostics: tuple[Diagnostic, ...]
    exit_code: int
    trace: str = ""
    unexpected: bool = False

    @classmethod
    def of(cls, error: Exception) -> Fault:
        """The fault that `error` means."""
        trace = "".join(traceback.format_exception(error))
        if isinstance(error, SleyError):
            return cls(error.diagnostics, error.exit_code, trace)
        return cls((_explain(error),), EXIT_RUN_FAILED, trace, unexpected=True)


def _explain(error: Exception) -> Diagnostic:
    message = _message(error)
    if type(error).__name__ == "OutOfMemoryError":
        hint = 'a smaller `batch.micro_size` needs less, and so does `[activations] use = "core.recompute"`'
        return Diagnostic("out-of-memory", message.splitlines()[0], hint=hint)
    culprit = _foreign_frame(error.__traceback__)
    if culprit is not None:
        place = Place(culprit.filename, culprit.lineno or 0, (culprit.colno or 0) + 1, _length(culprit))
        line = linecache.getline(culprit.filename, culprit.lineno or 0).rstrip("\n") or None
        hint = "this is not Sley's code but runs in it; `--traceback` shows the way there"
        return Diagnostic("own-code", message, place=place, source_line=line, hint=hint)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return Diagnostic("os-error", f"{error.strerror}: `{error.filename}`")
    return Diagnostic("internal-error", message, hint=BUG_HINT)


def _message(error: Exception) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


def _foreign_frame(trace: TracebackType | None) -> traceback.FrameSummary | None:
    """The innermost frame of code that is neither ours nor what we both stand on: a model, a dataset, a plugin."""
    found = None
    for step, summary in zip(_steps(trace), traceback.extract_tb(trace), strict=True):
        package = str(step.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        known = package in _OWN | _BELOW | _ABOVE or package in sys.stdlib_module_names
        if not known and Path(summary.filename).is_file():
            found = summary
    return found


def _steps(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _length(frame: traceback.FrameSummary) -> int:
    if frame.colno is None or frame.end_colno is None or frame.end_lineno != frame.lineno:
        return 1
    return max(1, frame.end_colno - frame.colno)

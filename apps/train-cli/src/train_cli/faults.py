"""Explains errors as diagnostics: the user's, of code that the plan names, of the system, or ours."""

from __future__ import annotations

import errno
import linecache
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from sley_core.errors import EXIT_RUN_FAILED, Diagnostic, Place, SleyError, is_foreign

_OWN = frozenset(
    {"sley_core", "sley_checkpoint", "sley_cma", "sley_data", "sley_doctor", "sley_dp", "sley_estimate", "sley_isp"}
    | {"sley_memory", "sley_metrics", "sley_models", "sley_pp", "sley_testing", "train_cli"}
)
_BELOW = frozenset({"torch", "numpy", "pydantic", "pydantic_core", "pluggy", "tomli", "tomli_w", "packaging"})
_ABOVE = frozenset({"typer", "rich", "click", "__main__"})
"""Code in these, or in Python's own library, is not where an error is reported: its caller is."""

_FULL = {
    errno.ENOSPC: "the disk is full: free some space, or choose another `run.folder`",
    errno.EDQUOT: "your quota is used up: free some space, or choose another `run.folder`",
    errno.EFBIG: "files may not be larger here (see `ulimit -f`)",
    errno.EROFS: "the file system is read-only; choose another `run.folder`",
}

BUG_HINT = "this is a bug in Sley: please report it with the output of `train-cli env`; `--traceback` shows where it is"


@dataclass(frozen=True)
class Fault:
    """Holds the diagnostics for the user, and the exit code. Without diagnostics nothing is shown, as after Ctrl-C.

    trace: the full chain of the error; to be shown without `--traceback` only if `unexpected`.
    """

    diagnostics: tuple[Diagnostic, ...]
    exit_code: int
    trace: str = ""
    unexpected: bool = False

    @classmethod
    def of(cls, error: Exception) -> Fault:
        """Returns the fault for `error`."""
        trace = "".join(traceback.format_exception(error))
        if isinstance(error, SleyError):
            return cls(error.diagnostics, error.exit_code, trace)
        return cls((_explain(error),), EXIT_RUN_FAILED, trace, unexpected=True)


def place_of(steps: Sequence[FrameType], lines: Sequence[int] = ()) -> tuple[Place | None, str | None]:
    """Returns place and source line of the innermost frame in user code: a model, a dataset, a plugin. None without one.

    lines: the line of each frame; by default its current one.
    """
    for step, line in reversed([*zip(steps, lines or [each.f_lineno for each in steps], strict=True)]):
        package = str(step.f_globals.get("__name__", "")).partition(".")[0]
        known = package in _OWN | _BELOW | _ABOVE or package in sys.stdlib_module_names
        if not known and Path(step.f_code.co_filename).is_file():
            file = step.f_code.co_filename
            return Place(file, line), linecache.getline(file, line).rstrip("\n") or None
    return None, None


def steps_of(frame: FrameType | None) -> list[FrameType]:
    """Returns a frame and its callers, the outermost first."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found[::-1]


def _explain(error: Exception) -> Diagnostic:
    """Returns the diagnostic of an error that is no SleyError: memory, disk, torch, user code, or a bug of ours."""
    message = _message(error)
    if _is_out_of_memory(error):
        hint = 'a smaller `batch.micro_size` needs less, and so does `[activations] use = "core.recompute"`'
        return Diagnostic("out-of-memory", message.splitlines()[0], hint=hint)
    if isinstance(error, OSError) and error.errno in _FULL:
        where = f"`{error.filename}`" if error.filename is not None else "a file"
        return Diagnostic("cannot-write", f"cannot write {where}: {os.strerror(error.errno)}", hint=_FULL[error.errno])
    if (broken := _broken_torch(error)) is not None:
        return broken
    culprit = _culprit(error)
    if culprit is not None:
        hint = "this is not Sley's code but runs in it; `--traceback` shows the way there"
        place, line = culprit
        return Diagnostic("own-code", message, place=place, source_line=line, hint=hint)
    if is_foreign(error):
        hint = "what the plan names does not fit together, or fails by itself; `--traceback` shows the way there"
        return Diagnostic("own-code", message, hint=hint)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return Diagnostic("os-error", f"{error.strerror}: `{error.filename}`")
    return Diagnostic("internal-error", message, hint=BUG_HINT)


def _message(error: Exception) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


def _is_out_of_memory(error: Exception) -> bool:
    """Returns whether memory ran out; torch has an exception class for devices, but only a message for the host."""
    words = "DefaultCPUAllocator: can't allocate memory" in str(error)
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or words


def _broken_torch(error: BaseException) -> Diagnostic | None:
    """Returns the diagnostic of a torch that is missing or cannot be imported; None for other errors."""
    if not isinstance(error, ImportError):
        return None
    names = {str(step.f_globals.get("__name__", "")) for step, _ in _steps(error)}
    if (error.name or "").partition(".")[0] != "torch" and "torch" not in names:
        return None
    hint = "install it again: https://pytorch.org/get-started; `python -c 'import torch'` must work"
    return Diagnostic("torch-broken", f"torch cannot be imported: {error}", hint=hint)


def _culprit(error: Exception) -> tuple[Place, str | None] | None:
    """Returns place, with columns, and source line of the user's code in which `error` arose."""
    steps = _steps(error)
    place, source = place_of([step for step, _ in steps], [line for _, line in steps])
    if place is None:
        return None
    last = next(each for each in reversed(traceback.extract_tb(error.__traceback__)) if each.filename == place.file)
    return Place(place.file, place.line, (last.colno or 0) + 1, _length(last)), source


def _steps(error: BaseException) -> list[tuple[FrameType, int]]:
    """Returns the frames and lines of the error's traceback, the outermost first."""
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return found


def _length(frame: traceback.FrameSummary) -> int:
    if frame.colno is None or frame.end_colno is None or frame.end_lineno != frame.lineno:
        return 1
    return max(1, frame.end_colno - frame.colno)

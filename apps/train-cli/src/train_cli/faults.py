"""Explains errors as diagnostics; passes a rank's fault to its launcher; and finds which rank of a world failed first.

When a rank dies, its peers see their connections close and fail too, and the agent terminates those left. Only the first
failure is worth showing. `blame` tries these candidates in turn:

    a rank died of a signal, left without a word, or reported what is no consequence of another's end      the first of them
    a rank was aborted by C++: the cause, if only its connections failed elsewhere
    a rank raised KeyboardInterrupt without a signal to the job
    a rank did not answer when it was asked to end, while others waited for it in vain
    a wait for others failed                                                                               the first of them
"""

from __future__ import annotations

import errno
import json
import linecache
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, Protocol

from pydantic import TypeAdapter

from sley_core.errors import EXIT_INTERRUPTED, EXIT_RUN_FAILED, EXIT_TERMINATED, Diagnostic, Place, SleyError, is_foreign
from sley_core.whole_files import write_whole
from train_cli.stopping import WARNINGS

_OWN = frozenset(
    {"sley_core", "sley_checkpoint", "sley_cma", "sley_data", "sley_doctor", "sley_dp", "sley_estimate", "sley_isp"}
    | {"sley_memory", "sley_metrics", "sley_models", "sley_pp", "sley_testing", "train_cli"}
)
_BELOW = frozenset({"torch", "numpy", "pydantic", "pydantic_core", "pluggy", "tomli", "tomli_w", "packaging"})
_ABOVE = frozenset({"typer", "rich", "click", "__main__"})
"""An error that arises in these, or in Python's own library, is reported at the caller."""

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


def _explain(error: Exception) -> Diagnostic:
    """Returns the diagnostic of an error that is no SleyError: memory, disk, torch, user code, or a bug of ours."""
    message = "".join(traceback.format_exception_only(error)).strip()
    # torch has an exception class for the memory of devices, but only a message for the host's.
    words = "DefaultCPUAllocator: can't allocate memory" in str(error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or words:
        hint = 'a smaller `batch.micro_size` needs less, and so does `[activations] use = "core.recompute"`'
        return Diagnostic("out-of-memory", message.splitlines()[0], hint=hint)
    if isinstance(error, OSError) and error.errno in _FULL:
        where = f"`{error.filename}`" if error.filename is not None else "a file"
        return Diagnostic("cannot-write", f"cannot write {where}: {os.strerror(error.errno)}", hint=_FULL[error.errno])
    steps = [*traceback.walk_tb(error.__traceback__)]
    if isinstance(error, ImportError):
        names = {str(frame.f_globals.get("__name__", "")) for frame, _ in steps}
        if (error.name or "").partition(".")[0] == "torch" or "torch" in names:
            hint = "install it again: https://pytorch.org/get-started; `python -c 'import torch'` must work"
            return Diagnostic("torch-broken", f"torch cannot be imported: {error}", hint=hint)
    place, source = _place_of([frame for frame, _ in steps], [line for _, line in steps])
    if place is not None:
        hint = "this is not Sley's code but runs in it; `--traceback` shows the way there"
        last = next(each for each in reversed(traceback.extract_tb(error.__traceback__)) if each.filename == place.file)
        place = Place(place.file, place.line, (last.colno or 0) + 1, _length(last))
        return Diagnostic("own-code", message, place=place, source_line=source, hint=hint)
    if is_foreign(error):
        hint = "what the plan names does not fit together, or fails by itself; `--traceback` shows the way there"
        return Diagnostic("own-code", message, hint=hint)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return Diagnostic("os-error", f"{error.strerror}: `{error.filename}`")
    return Diagnostic("internal-error", message, hint=BUG_HINT)


def _length(frame: traceback.FrameSummary) -> int:
    if frame.colno is None or frame.end_colno is None or frame.end_lineno != frame.lineno:
        return 1
    return max(1, frame.end_colno - frame.colno)


def _place_of(frames: Sequence[FrameType], lines: Sequence[int]) -> tuple[Place | None, str | None]:
    """Returns place and source line of the innermost frame in user code: a model, a dataset, a plugin. None without one.

    lines: the line of each frame; the outermost frame comes first.
    """
    for frame, line in reversed([*zip(frames, lines, strict=True)]):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        known = package in _OWN | _BELOW | _ABOVE or package in sys.stdlib_module_names
        file = frame.f_code.co_filename
        if not known and Path(file).is_file():
            return Place(file, line), linecache.getline(file, line).rstrip("\n") or None
    return None, None


_FILE = "TORCHELASTIC_ERROR_FILE"
_KEY = "sley"

_AFTERMATH = frozenset({"collective-failed", "rendezvous-failed", "group-failed", "start-failed"})
"""Codes that ranks report when a peer is gone."""

_AFTERMATH_S = 10
"""Seconds added to the time of such a report for torchrun: it shows the rank that failed first, by whole seconds, and
notices a death only after the dead rank's peers have reported.
"""

_LATE, _WAITING = "rank-late", "rank-waiting"


def write_report(fault: Fault) -> None:
    """Writes this rank's fault into the file that torchrun and our launcher read, unless there is none or it has one already:
    the first reason counts.

    The path and the form are those of elastic's `record`, so that torchrun names the rank that failed first; the key `sley` has
    the diagnostics, which our launcher shows once. The file is written in full or not at all.
    """
    name = os.environ.get(_FILE)
    if not name or Path(name).exists():
        return
    now = time.time()
    message = "\n".join(str(diagnostic) for diagnostic in fault.diagnostics)
    # torchrun shows the call stack, and the message only where there is none.
    stack = fault.trace if fault.unexpected else message
    at = int(now) + (_AFTERMATH_S if _is_aftermath(fault) else 0)
    content = {
        "message": {"message": message, "extraInfo": {"py_callstack": stack, "timestamp": str(at)}},
        _KEY: {"fault": asdict(fault), "time": now},
    }
    with suppress(OSError):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(Path(name), json.dumps(content))


def write_late_report() -> Diagnostic:
    """Writes the report of a rank that was asked to end and cannot, and returns it: it names where the main thread is now."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    trace = "".join(traceback.format_stack(frame)) if frame else ""
    frames = [each for each, _ in traceback.walk_stack(frame)][::-1] if frame else []
    ours = [name for each in frames if (name := each.f_globals.get("__name__", "")).startswith("sley_core.")]
    waits = bool(ours) and ours[-1].startswith("sley_core.comm.")  # the innermost: a device calls a run's methods
    place, line = _place_of(frames, [each.f_lineno for each in frames])
    where = f"it was at {place.file}:{place.line}" if place else "it was busy"
    diagnostic = Diagnostic(_WAITING if waits else _LATE, where, place=place, source_line=line)
    write_report(Fault((diagnostic,), EXIT_RUN_FAILED, trace))
    return diagnostic


def _is_aftermath(fault: Fault) -> bool:
    """Returns whether a rank's fault only reports that peers had ended."""
    return any(each.code in _AFTERMATH for each in fault.diagnostics)


def read_report(content: Mapping[str, Any]) -> tuple[Fault, float] | None:
    """Returns the fault in an error file's content and its time, in seconds since the epoch; None if Sley did not write it."""
    written = content.get(_KEY)
    if written is None:
        return None
    return TypeAdapter(Fault).validate_python(written["fault"]), written["time"]


_QUIET = frozenset({EXIT_INTERRUPTED, EXIT_TERMINATED, *(128 + number for number in WARNINGS), -signal.SIGTERM, -signal.SIGINT})

_SLACK_S = 2.0
"""A death is noticed a little after it happened; peers may report its consequences before."""

_HINTS: dict[int, str] = {
    signal.SIGKILL: "nobody inside the run does this: perhaps the kernel was short of memory (see `dmesg`), or a person",
    signal.SIGSEGV: "native code crashed: PYTHONFAULTHANDLER=1 shows where each thread was",
    signal.SIGILL: "native code used an instruction that this machine refuses, as torch's bf16 kernels do on some virtual "
    "machines: try with ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment",
    signal.SIGABRT: "native code gave up, and says why above: a failed assertion, or an exchange in which ranks differ",
    signal.SIGBUS: "often a full /dev/shm, or a memory-mapped file that became shorter",
    signal.SIGSYS: "the surroundings forbid a call of the system: `[parallel] cross_memory_attach = false` needs fewer",
}


class Failure(Protocol):
    """Has the fields of elastic's `ProcessFailure` that are read; a negative exit code is a signal."""

    exitcode: int
    error_file_data: dict[str, Any]
    timestamp: int


@dataclass(frozen=True)
class _Rank:
    """when: seconds since the epoch at which it failed, estimated if it left no report."""

    rank: int
    code: int
    fault: Fault | None
    when: float

    def has_code(self, *codes: str) -> bool:
        return self.fault is not None and self.fault.diagnostics[:1] != () and self.fault.diagnostics[0].code in codes


def blame(failures: Mapping[int, Failure], size: int, silent: Mapping[int, str] = MappingProxyType({})) -> Fault:
    """Returns one fault for a run of `size` ranks from its `failures` by rank, of which there is at least one.

    silent: the ranks that had to be killed when asked to end, with their last known state. Ranks that only obeyed a
    signal are not to blame; if all did, the fault is empty and has their exit code.
    """
    assert failures, "nobody failed"
    ranks = []
    for number, failure in sorted(failures.items()):
        fault, when = read_report(failure.error_file_data) or (None, failure.timestamp - _SLACK_S)
        ranks.append(_Rank(number, failure.exitcode, fault, when))
    late = [rank for rank in ranks if rank.has_code(_LATE, _WAITING)]
    acted = [rank for rank in ranks if rank not in late and (rank.fault or rank.rank not in silent)]
    guilty = [rank for rank in acted if rank.fault or rank.code not in _QUIET]
    waited = [rank for rank in guilty if rank.fault and _is_aftermath(rank.fault)]
    causes = [rank for rank in guilty if rank not in waited and rank.code != -signal.SIGABRT]
    aborted = [rank for rank in guilty if not rank.fault and rank.code == -signal.SIGABRT]
    if causes or aborted:
        return _fault_of(min(causes or aborted, key=lambda rank: rank.when), guilty, size)
    interrupted = [rank for rank in acted if waited and rank.code == EXIT_INTERRUPTED]
    if interrupted:
        message = f"rank {interrupted[0].rank} of {size} was interrupted alone"
        return Fault((Diagnostic("rank-died", message, hint="by SIGINT, or its code raised KeyboardInterrupt"),), 1)
    if waited:
        first = min(waited, key=lambda rank: rank.when)
        busy = {rank.rank: rank.fault for rank in late if rank.fault and not rank.has_code(_WAITING)}
        unheard = {rank: state for rank, state in silent.items() if rank not in {each.rank for each in late}}
        return _hung(unheard, busy, size, first) if busy or unheard else _fault_of(first, guilty, size)
    if silent:
        return _hung(silent, {}, size, None)
    code = ranks[0].code
    return Fault((), code if code > 0 else 128 - code)


def _fault_of(first: _Rank, guilty: Sequence[_Rank], size: int) -> Fault:
    """Returns the fault of the rank that failed first, with its name in each message unless all ranks report the same."""
    who = f"rank {first.rank} of {size}"
    if first.fault is not None:
        same = [rank for rank in guilty if rank.fault and rank.fault.diagnostics == first.fault.diagnostics]
        if len(same) == size:
            return first.fault
        named = tuple(replace(each, message=f"{who}: {each.message}") for each in first.fault.diagnostics)
        return replace(first.fault, diagnostics=named)
    if first.code > 0:
        message, hint = f"{who} left with exit code {first.code} and said nothing", "whatever it wrote stands above"
        return Fault((Diagnostic("rank-died", message, hint=hint),), EXIT_RUN_FAILED)
    number = -first.code
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return Fault((Diagnostic("rank-died", f"{who} was killed by {name}", hint=_HINTS.get(number)),), EXIT_RUN_FAILED)


def _hung(silent: Mapping[int, str], busy: Mapping[int, Fault], size: int, waiting: _Rank | None) -> Fault:
    """Returns the fault of ranks that did not answer: killed silently, or with a report of where they were busy.

    waiting: the rank that waited for them in vain.
    """
    states = [*silent.items(), *((rank, fault.diagnostics[0].message) for rank, fault in busy.items())]
    message = "; ".join(f"rank {rank} of {size} did not answer{f': {state}' if state else ''}" for rank, state in states)
    hint = None
    if waiting is not None and waiting.fault is not None:
        hint = f"rank {waiting.rank} waited for it: {waiting.fault.diagnostics[0].message}"
    where = next((fault.diagnostics[0] for fault in busy.values()), Diagnostic("rank-hung", ""))
    diagnostic = Diagnostic("rank-hung", message, place=where.place, source_line=where.source_line, hint=hint)
    return Fault((diagnostic,), EXIT_RUN_FAILED, "".join(fault.trace for fault in busy.values()))

"""Turns errors into diagnostics, passes the fault of a rank to its launcher, and finds the rank that failed first.

When a rank dies, its peers lose their connections and fail too, and the launcher terminates the remaining ranks. Only one
failure is shown. `find_cause` looks for a rank that failed in one of these ways, in this order, and takes the earliest failure:

    it died of a signal other than SIGABRT, exited without a report, or reported its own error
    it died of SIGABRT, which may also be the consequence of a peer's failure
    it raised KeyboardInterrupt although no signal reached the job
    it did not end when it received a signal, while other ranks waited for it
    its wait for other ranks failed
"""

import errno
import json
import linecache
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType, MappingProxyType

from pydantic import TypeAdapter

from sley_core.errors import EXIT_INTERRUPTED, EXIT_RUN_FAILED, EXIT_TERMINATED, Diagnostic, Place, SleyError, is_foreign
from sley_core.files import write_atomically
from train_cli.stopping import WARNING_SIGNALS, has_launcher

_SLEY_MODULES = frozenset(
    {"sley_core", "sley_checkpoint", "sley_cma", "sley_data", "sley_doctor", "sley_dp", "sley_estimate", "sley_hf"}
    | {"sley_isp", "sley_memory", "sley_metrics", "sley_models", "sley_optim", "sley_pp", "sley_testing"}
    | {"sley_trainer", "train_cli"}
)  # the import names of Sley's packages
_LIBRARIES = frozenset(
    {"torch", "numpy", "pydantic", "pydantic_core", "pluggy", "tomli", "tomli_w", "packaging", "typer", "click", "rich"}
)
"""The libraries that Sley uses. All code outside Sley, these libraries and the standard library is user code."""

_DISK_HINTS = {  # the hints for failed writes, by error number
    errno.ENOSPC: "the disk is full: free some space, or choose another `run.folder`",
    errno.EDQUOT: "your quota is used up: free some space, or choose another `run.folder`",
    errno.EFBIG: "the file would exceed the size limit; see `ulimit -f`",
    errno.EROFS: "the file system is read-only; choose another `run.folder`",
}

BUG_HINT = "this is a bug in Sley: please report it with the output of `train-cli env`; `--traceback` shows where it occurs"
"""The hint of an error that is a bug in Sley."""


@dataclass(frozen=True)
class Fault:
    """A failure of a command or rank: its diagnostics and exit code. After Ctrl-C there are no diagnostics to print. trace: the
    full traceback. is_unexpected: whether the error is not a SleyError, so that torchrun shows the traceback.
    """

    diagnostics: tuple[Diagnostic, ...]
    exit_code: int
    trace: str = ""
    is_unexpected: bool = False

    @classmethod
    def from_error(cls, error: Exception) -> "Fault":
        """Returns the fault of `error`, with its diagnostics if it is a SleyError, else with a diagnostic that explains it."""
        trace = "".join(traceback.format_exception(error))
        if isinstance(error, SleyError):
            return cls(error.diagnostics, error.exit_code, trace)
        return cls((_diagnose_error(error),), EXIT_RUN_FAILED, trace, is_unexpected=True)

    def with_label(self, label: str) -> "Fault":
        """Returns a copy of the fault in which each message begins with `label` and a colon."""
        diagnostics = (replace(diagnostic, message=f"{label}: {diagnostic.message}") for diagnostic in self.diagnostics)
        return replace(self, diagnostics=tuple(diagnostics))


def _diagnose_error(error: Exception) -> Diagnostic:
    """Returns a diagnostic of an error that is not a SleyError. Its code names the kind of error, such as "out-of-memory"."""
    message = "".join(traceback.format_exception_only(error)).strip()
    # torch has an exception class for device memory, but only a message for host memory.
    is_host_memory = "DefaultCPUAllocator: can't allocate memory" in str(error)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or is_host_memory:
        first_line = message.splitlines()[0]
        hint = 'use a smaller `batch.micro_size`, or `[activations] use = "core.recompute"`'
        return Diagnostic("out-of-memory", first_line, hint=hint)
    if isinstance(error, OSError) and error.errno in _DISK_HINTS:
        path = f"`{error.filename}`" if error.filename is not None else "a file"
        return Diagnostic("cannot-write", f"cannot write {path}: {os.strerror(error.errno)}", hint=_DISK_HINTS[error.errno])
    steps = [*traceback.walk_tb(error.__traceback__)]
    if isinstance(error, ImportError):
        names = {str(frame.f_globals.get("__name__", "")) for frame, _ in steps}
        if (error.name or "").partition(".")[0] == "torch" or "torch" in names:
            hint = "reinstall torch (https://pytorch.org/get-started); `python -c 'import torch'` must work"
            return Diagnostic("torch-broken", f"torch cannot be imported: {error}", hint=hint)
    place, source_line = _find_user_code(steps)
    if place is not None:
        hint = "the error is in your code; use `--traceback` to see the calls"
        last = next(call for call in reversed(traceback.extract_tb(error.__traceback__)) if call.filename == place.file)
        start, end = last.colno or 0, (last.end_colno or 0) if last.end_lineno == last.lineno else 0
        place = Place(place.file, place.line, start + 1, max(1, end - start))
        return Diagnostic("own-code", message, place=place, source_line=source_line, hint=hint)
    if is_foreign(error):
        hint = "the error was raised by code that the plan refers to; use `--traceback` to see the calls"
        return Diagnostic("own-code", message, hint=hint)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return Diagnostic("os-error", f"{error.strerror}: `{error.filename}`")
    return Diagnostic("internal-error", message, hint=BUG_HINT)


def _find_user_code(calls: Sequence[tuple[FrameType, int]]) -> tuple[Place | None, str | None]:
    """Returns the place and source line of the innermost user code, or (None, None). calls: (frame, line), outermost first."""
    for frame, line in reversed(calls):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        is_known = package in _SLEY_MODULES | _LIBRARIES | {"__main__"} or package in sys.stdlib_module_names
        file = frame.f_code.co_filename
        if not is_known and Path(file).is_file():
            return Place(file, line), linecache.getline(file, line).rstrip("\n") or None
    return None, None


ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""The environment variable with the path of a rank's error file, which torchrun or a local launch sets."""

PREFLIGHT = "preflight"
"""The error code of ranks that cannot start together."""

_EXIT_DELAY_S = 3.0
"""How long in seconds a rank waits while another rank prints its error, since its exit makes the launcher end all ranks."""

_FAULT_KEY = "sley"  # the key of the fault in an error file

_PEER_FAILURE_CODES = frozenset({"collective-failed", "rendezvous-failed", "group-failed", "start-failed"})
"""The error codes that a rank may report because one of its peers has ended."""

_PEER_FAILURE_DELAY_S = 10
"""The time in seconds that is added to the time of a report with a code of `_PEER_FAILURE_CODES`. torchrun shows the rank with
the earliest report, in whole seconds, and notices a death only after the dead rank's peers have reported.
"""

_BUSY_CODE, _WAITING_CODE = "rank-late", "rank-waiting"
"""The error codes of a rank that did not end after a signal: it was busy, or waited for other ranks."""


def write_error_file(fault: Fault) -> None:
    """Writes this rank's fault into the file that torchrun or the local launcher reads. Does nothing if the launcher reads no
    such file, or if the file exists.

    The path and format are those of torchelastic's `record`, so that torchrun names the rank that failed first. The `sley` key
    has the diagnostics, which the local launcher prints once. The file is written completely or, after an OSError, not at all.
    """
    name = os.environ.get(ERROR_FILE_VARIABLE)
    if not name or Path(name).exists():
        return
    time_s = time.time()
    message = "\n".join(str(diagnostic) for diagnostic in fault.diagnostics)
    # torchrun shows the call stack, and the message only if there is no call stack.
    stack = fault.trace if fault.is_unexpected else message
    is_peer_failure = any(diagnostic.code in _PEER_FAILURE_CODES for diagnostic in fault.diagnostics)
    timestamp = int(time_s) + (_PEER_FAILURE_DELAY_S if is_peer_failure else 0)
    content = {
        "message": {"message": message, "extraInfo": {"py_callstack": stack, "timestamp": str(timestamp)}},
        _FAULT_KEY: {"fault": asdict(fault), "time": time_s},
    }
    with suppress(OSError):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(Path(name), json.dumps(content))


def report_hang() -> Diagnostic:
    """Writes the error file of this rank, which did not end after a signal, and returns the diagnostic in it. The diagnostic
    names the user code that the main thread executes, if there is any.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    calls = [*traceback.walk_stack(frame)][::-1] if frame else []
    modules = [call.f_globals.get("__name__", "") for call, _ in calls]
    innermost_module = next((name for name in reversed(modules) if name.startswith(("sley_core.", "sley_trainer."))), "")
    code = _WAITING_CODE if innermost_module.startswith("sley_core.comm.") else _BUSY_CODE
    place, source_line = _find_user_code(calls)
    message = f"it was at {place.file}:{place.line}" if place else "it was busy"
    diagnostic = Diagnostic(code, message, place=place, source_line=source_line)
    write_error_file(Fault((diagnostic,), EXIT_RUN_FAILED, "".join(traceback.format_stack(frame)) if frame else ""))
    return diagnostic


def has_remote_peers() -> bool:
    """Returns whether this process is one of several ranks that a launcher other than `train-cli` has started, and that may be
    on several hosts. Only such ranks need the rendezvous of `train_cli.rendezvous`.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if "RANK" not in os.environ or not size.isdecimal() or int(size) == 1 or has_launcher():
        return False
    from sley_core.comm.world import STORE_VARIABLE

    return STORE_VARIABLE not in os.environ


class RankErrorReporter(AbstractContextManager["RankErrorReporter"]):
    """A context manager that prints an error of its block, writes it into the error file, and raises SystemExit instead. An
    error before `is_training` is set occurs on all ranks, or keeps this rank from joining the others. Such an error is sent to
    the other ranks, but only rank 0 and the first rank of each host print it. rank: this rank. print_function: prints a fault;
    None if a local launcher prints errors.
    """

    def __init__(self, rank: int, print_function: Callable[[Fault], None] | None = None) -> None:
        self._rank = rank
        self._print_function = print_function
        self.is_training = False

    def __exit__(self, _error_type: object, error: BaseException | None, _traceback: object) -> None:
        if not isinstance(error, Exception):
            return
        fault = Fault.from_error(error)
        prints = self._rank == 0 or os.environ.get("LOCAL_RANK") == "0"
        if self.is_training:
            prints = prints or all(diagnostic.code != PREFLIGHT for diagnostic in fault.diagnostics)
            if self._rank:
                fault = fault.with_label(f"rank {self._rank}")
        write_error_file(fault)
        if prints and self._print_function is not None:
            self._print_function(fault)
        if not self.is_training and has_remote_peers():
            from train_cli.rendezvous import notify_peers

            notify_peers(fault)
        if not prints and self._print_function is not None:
            time.sleep(_EXIT_DELAY_S)
        raise SystemExit(fault.exit_code) from error


SIGNAL_EXIT_CODES = frozenset(
    {EXIT_INTERRUPTED, EXIT_TERMINATED, *(128 + number for number in WARNING_SIGNALS), -signal.SIGTERM, -signal.SIGINT}
)  # the exit codes of ranks that ended because a signal told them to

_REPORT_LEAD_S = 2.0
"""The estimated time in seconds from a rank's death until its launcher notices it, in which a peer may report the death."""

_SIGNAL_HINTS: dict[int, str] = {  # the hints for killed ranks, by signal number
    signal.SIGKILL: "the process was killed from outside: look for the OOM killer in `dmesg`",
    signal.SIGSEGV: "native code crashed: set PYTHONFAULTHANDLER=1 to see the stack of each thread",
    signal.SIGILL: "native code used an instruction that this machine refuses, as torch's bf16 kernels do on some virtual "
    "machines: set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment",
    signal.SIGABRT: "native code aborted and printed the reason: a failed assertion, or an exchange in which ranks differ",
    signal.SIGBUS: "check whether /dev/shm is full, or whether a memory-mapped file became shorter",
    signal.SIGSYS: "this machine forbids a system call: set `[parallel] cross_memory_attach = false` to use fewer system calls",
}


@dataclass(frozen=True)
class FailedRank:
    """A rank of a local launch that has failed. exit_code: the exit code of its process, or the negative number of the signal
    that killed it. fault: the fault that the rank reported, or None if it left no report. failed_at_s: the time of the failure
    in seconds since the epoch, estimated if there is no report.
    """

    rank: int
    exit_code: int
    fault: Fault | None
    failed_at_s: float

    @classmethod
    def read(cls, rank: int, exit_code: int, error_file: Path) -> "FailedRank":
        """Returns the object for `rank`, which has just ended. error_file: the path of its report, which may be missing."""
        with suppress(OSError, ValueError):
            if content := json.loads(error_file.read_text("utf-8")).get(_FAULT_KEY):
                return cls(rank, exit_code, TypeAdapter(Fault).validate_python(content["fault"]), content["time"])
        return cls(rank, exit_code, None, time.time() - _REPORT_LEAD_S)

    def has_code(self, *codes: str) -> bool:
        """Returns whether the first diagnostic of the rank's report has one of the error codes `codes`."""
        return self.fault is not None and any(diagnostic.code in codes for diagnostic in self.fault.diagnostics[:1])


def find_cause(ranks: Sequence[FailedRank], world_size: int, killed_states: Mapping[int, str] = MappingProxyType({})) -> Fault:
    """Returns the fault to show for a run of `world_size` ranks, given its failed `ranks`, at least one. killed_states: a
    description of the process state of each rank that had to be killed. Ranks that only obeyed a signal are not blamed. If all
    failed ranks obeyed a signal, the fault has their exit code and no diagnostics.
    """
    ranks = sorted(ranks, key=lambda rank: rank.rank)
    assert ranks, "no rank failed"
    hung_ranks = [rank for rank in ranks if rank.has_code(_BUSY_CODE, _WAITING_CODE)]
    active_ranks = [rank for rank in ranks if rank not in hung_ranks and (rank.fault or rank.rank not in killed_states)]
    failed_ranks = [rank for rank in active_ranks if rank.fault or rank.exit_code not in SIGNAL_EXIT_CODES]
    waiting_ranks = [rank for rank in failed_ranks if rank.has_code(*_PEER_FAILURE_CODES)]
    causes = [rank for rank in failed_ranks if rank not in waiting_ranks and rank.exit_code != -signal.SIGABRT]
    aborted_ranks = [rank for rank in failed_ranks if not rank.fault and rank.exit_code == -signal.SIGABRT]
    if causes or aborted_ranks:
        first = min(causes or aborted_ranks, key=lambda rank: rank.failed_at_s)
        return _describe_failed_rank(first, failed_ranks, world_size)
    if not waiting_ranks:
        code = ranks[0].exit_code
        if killed_states:
            return _describe_hung_ranks(killed_states, {}, world_size)
        return Fault((), code if code > 0 else 128 - code)
    for rank in active_ranks:
        if rank.exit_code == EXIT_INTERRUPTED:
            message = f"only rank {rank.rank} of {world_size} was interrupted"
            hint = "check whether it received SIGINT, or whether its code raised KeyboardInterrupt"
            return Fault((Diagnostic("rank-died", message, hint=hint),), EXIT_RUN_FAILED)
    first = min(waiting_ranks, key=lambda rank: rank.failed_at_s)
    busy_faults = {rank.rank: rank.fault for rank in hung_ranks if rank.fault and rank.has_code(_BUSY_CODE)}
    reported_numbers = {rank.rank for rank in hung_ranks}
    unreported_states = {rank: state for rank, state in killed_states.items() if rank not in reported_numbers}
    if busy_faults or unreported_states:
        return _describe_hung_ranks(unreported_states, busy_faults, world_size, first)
    return _describe_failed_rank(first, failed_ranks, world_size)


def _describe_failed_rank(first: FailedRank, failed_ranks: Sequence[FailedRank], world_size: int) -> Fault:
    """Returns the fault of `first`, which failed first. Its messages name the rank unless all ranks report the same fault."""
    label = f"rank {first.rank} of {world_size}"
    if first.fault is not None:
        num_equal = sum(rank.fault is not None and rank.fault.diagnostics == first.fault.diagnostics for rank in failed_ranks)
        return first.fault if num_equal == world_size else first.fault.with_label(label)
    if first.exit_code > 0:
        message, hint = f"{label} exited with code {first.exit_code} and left no report", "read its output above"
        return Fault((Diagnostic("rank-died", message, hint=hint),), EXIT_RUN_FAILED)
    number = -first.exit_code
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return Fault((Diagnostic("rank-died", f"{label} was killed by {name}", hint=_SIGNAL_HINTS.get(number)),), EXIT_RUN_FAILED)


def _describe_hung_ranks(
    killed_states: Mapping[int, str], busy_faults: Mapping[int, Fault], world_size: int, waiting: FailedRank | None = None
) -> Fault:
    """Returns the fault of ranks that did not end after a signal. killed_states: the process states of ranks without a report.
    busy_faults: the faults that busy ranks reported. waiting: a rank that waited for one of these ranks, or None.
    """
    states = [*killed_states.items(), *((rank, fault.diagnostics[0].message) for rank, fault in busy_faults.items())]
    message = "; ".join(f"rank {rank} of {world_size} did not respond{f': {state}' if state else ''}" for rank, state in states)
    hint = None
    if waiting is not None and waiting.fault is not None:
        hint = f"rank {waiting.rank} waited for its peers: {waiting.fault.diagnostics[0].message}"
    location = next((fault.diagnostics[0] for fault in busy_faults.values()), Diagnostic("rank-hung", ""))
    diagnostic = Diagnostic("rank-hung", message, place=location.place, source_line=location.source_line, hint=hint)
    return Fault((diagnostic,), EXIT_RUN_FAILED, "".join(fault.trace for fault in busy_faults.values()))

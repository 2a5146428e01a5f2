"""Decides why a run failed, from the reports of its ranks and of its launcher: cause, rank, layer, action and remedy.

The verdicts are tried in this order, since each event in the list may cause the events below it:

    a rank raised an error that no other rank caused
    a rank was killed, or exited without a report
    a rank was stopped, or was busy while others waited for it
    ranks started different exchanges, or waited for each other in different exchanges
    a rank left no report while others waited for it
    none of these: the message of the first report
"""

import json
import re
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from sley_core.actions.action import describe_action
from sley_core.run_folder import METRICS_FILE, read_rows
from sley_doctor.fault_report import AttemptReports, ExchangeRecord, FaultReport, LaunchReport
from sley_doctor.work_record import WorkRecord
from train_cli.faults import SIGNAL_EXIT_CODES
from train_cli.run_folder import FolderInUseError, check_unlocked
from train_cli.saved_run import SUMMARY

DivergenceType = Literal["size", "left out", "too many", "other", "not started"]

_MESSAGE_OPERATIONS = frozenset({"send", "receive"})  # the operations of exchanges with only two ends
_MESSAGE_PATTERN = re.compile(r"(announcement of )?what stage .* for microbatch (\d+) \((forward|backward)")
"""Matches the description of a pipeline message. Group 1: "announcement of ", or None if it is not an announcement. Group 2:
the microbatch. Group 3: the direction, "forward" or "backward".
"""

_READ_QUEUE_PATTERN = re.compile(r" of \d+$")
"""Matches the end of the name of a queue in which a rank waits until other ranks have read its data. The rest of the name is
the queue of the exchange itself.
"""


@dataclass(frozen=True)
class Divergence:
    """A divergence of ranks. kind: a keyword, such as "left out". ranks: the ranks that differ from the majority; empty if
    there is no majority. exchanges: the differing exchanges, the most likely cause first. description: a sentence for users.
    """

    kind: DivergenceType
    ranks: tuple[int, ...]
    exchanges: tuple[ExchangeRecord, ...]
    description: str


def is_same_exchange(first: ExchangeRecord, second: ExchangeRecord) -> bool:
    """Returns whether the records of two ranks agree in description and size. Their queue and number must be the same."""
    return _has_same_description(first, second) and first.num_bytes == second.num_bytes


def _has_same_description(first: ExchangeRecord, second: ExchangeRecord) -> bool:
    """Returns whether two exchanges have the same description, or are the two ends of one message."""
    if not {first.operation, second.operation} <= _MESSAGE_OPERATIONS:
        return (first.operation, first.label) == (second.operation, second.label)
    # At one end of some messages, the description has no direction and no microbatch.
    matches = [re.search(_MESSAGE_PATTERN, description) for description in (first.label, second.label)]
    message_ids = {match.groups() for match in matches if match}
    return len(message_ids) <= 1


def find_late_ranks(report: FaultReport, by_rank: Mapping[int, FaultReport]) -> list[int]:
    """Returns the ranks that have not started the exchange in which the rank of `report` waits; [] if there is no wait."""
    wait = report.wait
    if wait is None:
        return []
    if wait.peer is not None:
        return [wait.peer]
    exchange = wait.exchange
    queue = _READ_QUEUE_PATTERN.sub("", exchange.queue)
    late_ranks = []
    for rank in exchange.ranks if exchange.peer is None else (exchange.peer,):
        started = by_rank[rank].exchanges.get(queue, ()) if rank in by_rank else ()
        if rank != report.rank and not (started and started[-1].number >= exchange.number):
            late_ranks.append(rank)
    return late_ranks


def _find_mismatch(by_rank: Mapping[int, FaultReport]) -> Divergence | None:
    """Returns the divergence at the first number with different exchanges in a queue, or None. Queues with waits come first."""
    awaited_queues = [
        _READ_QUEUE_PATTERN.sub("", report.wait.exchange.queue) for report in by_rank.values() if report.wait is not None
    ]
    all_queues = [queue for report in by_rank.values() for queue in report.exchanges]
    for queue in dict.fromkeys([*awaited_queues, *all_queues]):
        groups: dict[tuple[int, ...], dict[int, dict[int, ExchangeRecord]]] = {}
        for rank, report in by_rank.items():
            if exchanges := report.exchanges.get(queue):
                groups.setdefault(exchanges[-1].ranks, {})[rank] = {exchange.number: exchange for exchange in exchanges}
        for started in groups.values():
            for number in sorted({number for numbers in started.values() for number in numbers}):
                exchanges_at_number = {rank: numbers[number] for rank, numbers in started.items() if number in numbers}
                if len(rank_groups := _group_by_exchange(exchanges_at_number)) > 1:
                    return _describe_mismatch(started, number, rank_groups)
    return None


def _group_by_exchange(exchanges: Mapping[int, ExchangeRecord]) -> list[list[int]]:
    """Returns groups of ranks with the same exchange, the largest group first."""
    groups: list[list[int]] = []
    for rank, exchange in exchanges.items():
        group = next((group for group in groups if is_same_exchange(exchanges[group[0]], exchange)), None)
        if group is None:
            groups.append([rank])
        else:
            group.append(rank)
    return sorted(groups, key=len, reverse=True)


def _describe_mismatch(
    started: Mapping[int, Mapping[int, ExchangeRecord]], number: int, rank_groups: list[list[int]]
) -> Divergence:
    """Returns the divergence at number `number` of a queue. started: each rank's exchanges in the queue, by number.
    rank_groups: the ranks with the same exchange, the largest group first.
    """
    usual_rank, odd_rank = rank_groups[0][0], rank_groups[1][0]
    usual_exchanges, odd_exchanges = started[usual_rank], started[odd_rank]
    has_majority = len(rank_groups[0]) > len(rank_groups[1])
    odd_ranks = tuple(rank for group in rank_groups[1:] for rank in group) if has_majority else ()
    odd, usual = odd_exchanges[number], usual_exchanges[number]
    exchanges = (usual, odd)
    if _has_same_description(odd, usual):
        description = f"rank {odd_rank} has {odd.num_bytes} bytes for the {odd}, but rank {usual_rank} has {usual.num_bytes}"
        return Divergence("size", odd_ranks, exchanges, description)
    differ = f"rank {odd_rank} starts the {odd}, but rank {usual_rank} starts the {usual}, as number {number} of one queue"
    next_usual, next_odd = usual_exchanges.get(number + 1), odd_exchanges.get(number + 1)
    subject = f"rank {odd_rank}" if has_majority else "one rank"
    if next_usual is not None and is_same_exchange(next_usual, odd):
        alternative = "" if has_majority else ", or the other rank makes it once too often"
        return Divergence("left out", odd_ranks, exchanges, f"{differ}: {subject} has skipped the {usual}{alternative}")
    if next_odd is not None and is_same_exchange(next_odd, usual):
        alternative = "" if has_majority else ", or the other rank has skipped it"
        description = f"{differ}: {subject} makes the {odd} once too often{alternative}"
        return Divergence("too many", odd_ranks, (odd, usual), description)
    return Divergence("other", odd_ranks, exchanges, differ)


class _LateExchange(NamedTuple):
    """The exchange in which `rank` waits. num_started: the number of ranks with reports that have started the exchange.
    late_ranks: the ranks with reports that have not started it.
    """

    num_started: int
    rank: int
    exchange: ExchangeRecord
    late_ranks: tuple[int, ...]


def _find_missing_start(by_rank: Mapping[int, FaultReport]) -> Divergence | None:
    """Returns a divergence if a rank waits in an exchange that ranks which wait elsewhere have not started; None otherwise."""
    late_exchanges = sorted(_find_late_exchanges(by_rank), key=lambda late_exchange: late_exchange[:2])
    if not late_exchanges:
        return None
    # The cause is the exchange that the fewest ranks have started, within a cycle of messages if there is one. All other waits
    # are consequences of it.
    first = (_find_message_cycle(late_exchanges) or late_exchanges)[0]
    peer_exchanges = (report.exchanges.get(first.exchange.queue, ()) for rank, report in by_rank.items() if rank != first.rank)
    was_seen_before = any(exchange.label == first.exchange.label for started in peer_exchanges for exchange in started)
    if len(first.late_ranks) > first.num_started and was_seen_before:
        # Other ranks have already started an exchange like this one, so this rank is ahead: it left out the exchange in which
        # the other ranks wait.
        first = next((late_exchange for late_exchange in late_exchanges if late_exchange.late_ranks == (first.rank,)), first)
    wait = by_rank[first.late_ranks[0]].wait
    assert wait is not None, first
    exchanges = (first.exchange, wait.exchange)
    description = (
        f"rank {first.rank} is in the {first.exchange}, which rank {first.late_ranks[0]} has not started; that rank is in the "
        f"{wait.exchange}"
    )
    if first.num_started > len(first.late_ranks):
        return Divergence("left out", first.late_ranks, exchanges, description)
    if len(first.late_ranks) > first.num_started:
        return Divergence("too many", (first.rank,), exchanges, description)
    return Divergence("not started", (), exchanges, description)


def _find_message_cycle(late_exchanges: Sequence[_LateExchange]) -> list[_LateExchange]:
    """Returns the messages of ranks that wait for each other in a cycle, or [] if there is no cycle."""
    waits = {late.rank: late for late in late_exchanges if late.exchange.peer is not None}
    for start in waits:
        cycle = [start]
        while (awaited := waits[cycle[-1]].late_ranks[0]) in waits and awaited not in cycle:
            cycle.append(awaited)
        if awaited == start:
            return [waits[rank] for rank in sorted(cycle)]
    return []


def _find_late_exchanges(by_rank: Mapping[int, FaultReport]) -> Iterator[_LateExchange]:
    """Yields the exchange of each waiting rank if ranks that wait in other exchanges have not started that exchange."""
    for rank, report in by_rank.items():
        late = [member for member in find_late_ranks(report, by_rank) if member in by_rank and by_rank[member].wait is not None]
        if report.wait is not None and late:
            exchange = report.wait.exchange
            # A message has two ends, however large its group is, so no third rank shows which end is wrong.
            num_members = 2 if exchange.peer is not None else sum(member in by_rank for member in exchange.ranks)
            yield _LateExchange(num_members - len(late), rank, exchange, tuple(late))


RUNNING, KILLED, UNKNOWN = "running", "killed", "unknown"
"""The states of a run whose last start has written no summary. Otherwise, the state is the outcome in the summary."""

RECENT_S = 60.0  # a run that wrote files within this time may be active on another host, whose locks are not visible here
MAX_CLOCK_DIFFERENCE_S = 2.0  # the largest expected difference between the clocks of two hosts; a restart takes longer


@dataclass(frozen=True)
class RunState:
    """The progress of a run.

    state: RUNNING, the outcome in the run's summary, KILLED if the run ended without a summary, or UNKNOWN if it may be running
    on another host. step: the last step that all ranks have finished; 0 if no such step is known. time: when the row of this
    step was written, in seconds since the epoch; None if the time is not known.

    The row of a step is written when all ranks have reached the end of the step, where they sum the loss. So the last row shows
    how far all ranks got, even if all were killed at once and none could write a report.
    """

    state: str
    step: int
    time: float | None


def find_run_state(run: Path, records: Sequence[WorkRecord], now: float) -> RunState:
    """Returns the progress of the run in folder `run`. now: seconds since the epoch. Raises OSError for unreadable files."""
    steps = [int(row["step"]) for row in read_rows(run)]
    step = max(steps, default=0)
    time = (run / METRICS_FILE).stat().st_mtime if step else None
    if not step and records:  # a run that does not use the writer `core.jsonl`
        last_window = min(
            (record.windows[-1] for record in records if record.windows), key=lambda window: window.last, default=None
        )
        step, time = (last_window.last, last_window.time) if last_window else (0, None)
    try:
        check_unlocked(run)
    except FolderInUseError:
        return RunState(RUNNING, step, time)
    outcome = _read_last_outcome(run, len(steps), max((record.start.time for record in records), default=0.0))
    # Without a lock on this host, the run may still be active: only the host of rank 0 has the lock.
    times = [record.windows[-1].time for record in records if record.windows]
    host = records[0].start.host if records else socket.gethostname()
    if outcome == KILLED and (host != socket.gethostname() or now - max([*times, time or 0.0]) < RECENT_S):
        outcome = UNKNOWN
    return RunState(outcome, step, time)


def _read_last_outcome(run: Path, num_rows: int, start: float) -> str:
    """Returns the outcome in the summary of the last start, or KILLED if it has none. A summary belongs to an earlier start if
    it has fewer steps than `num_rows`, or is older than `start`, the time of the last start in seconds since the epoch.
    """
    try:
        content = json.loads((run / SUMMARY).read_text("utf-8"))
        is_earlier = num_rows > content["steps"] or start > (run / SUMMARY).stat().st_mtime + MAX_CLOCK_DIFFERENCE_S
        return KILLED if is_earlier else str(content["outcome"])
    except (OSError, ValueError, KeyError, TypeError):
        return KILLED


def describe_state(state: RunState, now: float) -> str:
    """Returns a sentence that describes `state`. now: the current time in seconds since the epoch."""
    ago = ""
    if state.time is not None:
        seconds = max(0.0, now - state.time)
        ago = f", {seconds:.0f} s ago" if seconds < 120 else f", {seconds / 60:.0f} min ago"
        ago = f", {seconds / 3600:.0f} h ago" if seconds >= 7200 else ago
    progress = f"all ranks finished step {state.step}{ago}" if state.step else "no step was finished"
    no_summary = "the last attempt wrote no summary, and no process on this host holds the run's lock"
    match state.state:
        case "running":
            return f"the run is still running; {progress}"
        case "killed":
            beyond = f", but none finished step {state.step + 1}" if state.step else ""
            return f"{no_summary}: the run was killed; {progress}{beyond}"
        case "unknown":
            hint = "repeat this command in a minute, or on the host of rank 0"
            return f"{no_summary}: the run may be running on another host, or was killed ({hint}); {progress}"
    return f"the run has ended: {state.state}; {progress}"


_MAX_MESSAGE = 240  # the maximum number of characters of an error message in a line; longer messages are cut

_SHARED_CODES = frozenset(
    {"collective-failed", "ranks-differ", "stages-differ", "boundary-mismatch", "group-failed", "start-failed"}
)
"""Codes of errors that another rank may have caused."""

_ABORT_CODE = -signal.SIGABRT  # the exit code of a process that native code aborted
_STUCK = "stuck"  # the kind of a report of a rank that could not end when asked to

# The remedies of verdicts.
_SLOW_REMEDY = "check the code that the rank was running; if it is only slow, set a longer `[limits] collective_timeout_s`"
_STOPPED_REMEDY = "the cause is outside the run: a user, a debugger, a batch system that suspends jobs; start the run again"
_ORDER_REMEDY = (
    "all ranks of a group must start the same exchanges in the same order: check for code that depends on the rank or its "
    "data, in the forward and in your own hooks and handlers, near this exchange"
)
_KILLED_REMEDY = "the process was killed from outside: check `dmesg` for the OOM killer"
_ABORTED_REMEDY = (
    "native code aborted the process; the run's output has its message. After gloo's `Received data size doesn't match`, ranks "
    "diverged in this exchange or a concurrent one, and either may be wrong: check for code that depends on a rank's data"
)
_UNKNOWN_REMEDY = "check the machine of that rank; the report of every rank is in the folder `faults` of the run"


@dataclass(frozen=True)
class Verdict:
    """The verdict on a failed attempt. kind: a keyword for the cause; see docs/when-it-fails.md. cause: a sentence. ranks: the
    ranks at fault; empty if they are unknown, for example if two ranks differ and either may be wrong. exchanges: the exchanges
    that failed, the most likely cause first. step: the optimizer step, from 1; 0 if unknown. action, layer: where the rank was
    in the step; "" if unknown.
    """

    kind: str
    cause: str
    ranks: tuple[int, ...]
    remedy: str
    exchanges: tuple[ExchangeRecord, ...] = ()
    step: int = 0
    action: str = ""
    layer: str = ""


def find_verdict(reports: AttemptReports) -> Verdict:
    """Returns the verdict on one attempt from all its reports."""
    by_rank = {report.rank: report for report in reports.ranks}
    return (
        _find_error_verdict(by_rank)
        or _find_launch_verdict(by_rank, reports.launch)
        or _find_busy_verdict(by_rank)
        or _find_divergence_verdict(by_rank)
        or _find_missing_verdict(by_rank)
        or _build_fallback_verdict(by_rank)
    )


def _find_error_verdict(by_rank: Mapping[int, FaultReport]) -> Verdict | None:
    """Returns the verdict on the first rank that raised an error that no other rank caused; None if no rank did."""
    errors = [report for report in by_rank.values() if report.kind != _STUCK and report.code not in _SHARED_CODES]
    if not errors:
        return None
    first = min(errors, key=lambda report: report.time)
    ranks = tuple(report.rank for report in errors if (report.code, report.message) == (first.code, first.message))
    subject = "all ranks" if len(ranks) == first.world > 1 else f"rank {first.rank}"
    cause = f"{subject} failed: {' '.join(first.message.split())}"
    remedy = first.hint or "the report of that rank has the traceback"
    return _add_position(first, Verdict("error", cause, ranks if subject == "all ranks" else (first.rank,), remedy))


def _find_launch_verdict(by_rank: Mapping[int, FaultReport], launch: LaunchReport | None) -> Verdict | None:
    """Returns the verdict on a rank without a report that was killed, exited, or did not respond to its launcher. Returns None
    if there is no such rank.
    """
    if launch is None:
        return None
    codes = {
        rank: code
        for rank, code in sorted(launch.codes.items())
        if rank not in by_rank and rank not in launch.silent and code not in SIGNAL_EXIT_CODES
    }
    # A rank that native code aborted is named only if no other rank ended unexpectedly.
    for rank, code in sorted(codes.items(), key=lambda item: (item[1] == _ABORT_CODE, item[0] != launch.first)):
        signal_name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        end = f"was killed by {signal_name}" if code < 0 else f"exited with code {code} without a report"
        return _build_peer_verdict(
            rank, f"rank {rank} {end}", "killed", _ABORTED_REMEDY if code == _ABORT_CODE else _KILLED_REMEDY, by_rank
        )
    for rank, state in sorted(launch.silent.items()):
        if rank not in by_rank:
            cause = f"rank {rank} did not respond{f': {state}' if state else ''}"
            return _build_peer_verdict(rank, cause, "stopped", _STOPPED_REMEDY if state else _UNKNOWN_REMEDY, by_rank)
    return None


def _find_busy_verdict(by_rank: Mapping[int, FaultReport]) -> Verdict | None:
    """Returns the verdict on a rank that was stuck outside any exchange, or None if there is no such rank."""
    for report in by_rank.values():
        if report.kind == _STUCK and report.wait is None:
            cause = f"rank {report.rank} did not reach the other ranks: {report.message}"
            return _add_position(report, _build_peer_verdict(report.rank, cause, "busy", _SLOW_REMEDY, by_rank))
    return None


def _find_divergence_verdict(by_rank: Mapping[int, FaultReport]) -> Verdict | None:
    """Returns the verdict on ranks that started, or wait in, different exchanges; None if there are none."""
    divergence = _find_mismatch(by_rank) or _find_missing_start(by_rank)
    if divergence is None:
        return None
    if divergence.ranks:
        odd_rank = divergence.ranks[0]
        cause, first = f"rank {odd_rank} differs from the other ranks: {divergence.description}", by_rank[odd_rank]
    else:
        cause = f"ranks have diverged: {divergence.description}"
        first = min(by_rank.values(), key=lambda report: report.time)
    return _add_position(first, Verdict(divergence.kind, cause, divergence.ranks, _ORDER_REMEDY, divergence.exchanges))


def _find_missing_verdict(by_rank: Mapping[int, FaultReport]) -> Verdict | None:
    """Returns the verdict on a rank that left no report while other ranks waited for it; None if no rank did."""
    for rank in (rank for report in by_rank.values() for rank in find_late_ranks(report, by_rank)):
        if rank not in by_rank:
            cause = f"rank {rank} left no report: it was killed or stopped, or its machine is down"
            return _build_peer_verdict(rank, cause, "missing", _UNKNOWN_REMEDY, by_rank)
    return None


def _build_fallback_verdict(by_rank: Mapping[int, FaultReport]) -> Verdict:
    """Returns a verdict that repeats the message of the first report, for use if no other verdict fits."""
    if not by_rank:
        return Verdict("unknown", "no rank has written a report", (), _UNKNOWN_REMEDY)
    first = min(by_rank.values(), key=lambda report: report.time)
    exchanges = () if first.wait is None else (first.wait.exchange,)
    return _add_position(first, Verdict("said", first.message, (), first.hint or _UNKNOWN_REMEDY, exchanges))


def _build_peer_verdict(rank: int, cause: str, kind: str, remedy: str, by_rank: Mapping[int, FaultReport]) -> Verdict:
    """Returns a verdict of kind `kind` on `rank`, with the exchanges in which other ranks waited for it."""
    waiting = [report for report in by_rank.values() if report.wait is not None and rank in report.wait.exchange.ranks]
    # Exchanges with few members come first. An exchange of all ranks, such as the last of a step, says less about the cause.
    waiting.sort(key=lambda report: (len(report.wait.exchange.ranks) if report.wait else 0, report.time))
    if not waiting:
        return Verdict(kind, cause, (rank,), remedy)
    first = waiting[0]
    assert first.wait is not None, first
    text = f"{cause}; rank {first.rank} waited for it in the {first.wait.exchange}"
    exchanges = tuple(dict.fromkeys(report.wait.exchange for report in waiting if report.wait is not None))
    return Verdict(kind, text, (rank,), remedy, exchanges, first.step)


def _add_position(report: FaultReport, verdict: Verdict) -> Verdict:
    """Returns `verdict` with the step, action and layer of `report`."""
    return replace(verdict, step=report.step, action=report.pending, layer=report.layer)


def describe_report(report: FaultReport) -> str:
    """Returns one line about a report: the rank's position in its step, its wait, and its error."""
    stage = "" if report.stage is None else f" (stage {report.stage})"
    parts = [f"step {report.step}" if report.step else "before the first step"]
    if report.finished:
        parts.append(f"after {describe_action(report.finished)}")
    if report.pending:
        parts.append(f"in {describe_action(report.pending)}")
    if report.layer:
        parts.append(f"last layer called: {report.layer}")
    if (wait := report.wait) is not None:
        size = f", {wait.exchange.num_bytes} bytes" if wait.exchange.num_bytes else ""
        peer = "" if wait.peer is None else f" for rank {wait.peer}"
        number = f"number {wait.exchange.number} of `{wait.exchange.queue}`"
        parts.append(f"waited {wait.seconds:.1f} s{peer} in the {wait.exchange} ({number}{size})")
    error = " ".join(f"{report.code}: {report.message}".split())
    return f"rank {report.rank}{stage}: {', '.join(parts)}; {error[:_MAX_MESSAGE]}{'...' if len(error) > _MAX_MESSAGE else ''}"

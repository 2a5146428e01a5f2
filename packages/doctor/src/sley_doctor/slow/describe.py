"""Describes a judgement: a line for each cause, its remedy, and a line for each rank."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from sley_doctor.reports.work_record import (
    BEGINNING,
    BETWEEN,
    DATA,
    DEVICE,
    EVALUATION,
    MESSAGES,
    REDUCTION,
    UPDATE,
    WorkRecord,
)
from sley_doctor.slow.blocks import median
from sley_doctor.slow.judge import MIN_SHARE, Cause, Judgement

MIN_SHOWN_S = 5e-5  # shorter times are not shown

_ACTIONS = {
    "F": "forward",
    "B": "backward",
    "I": "backward for inputs",
    "W": "backward for weights",
    "C": "start of the gradients' reduction",
}
_LOCATIONS = {
    DATA: "wait for data",
    BEGINNING: "beginning of the step",
    MESSAGES: "start of messages to other stages",
    REDUCTION: "end of the gradients' reduction",
    UPDATE: "update (norm, clip, optimizer)",
    DEVICE: "wait for the device",
    BETWEEN: "time between steps (metrics, checkpoints, listeners)",
    EVALUATION: "evaluation",
}
_REMEDIES = {
    "F": "check the machine of that rank (other processes, clock, temperature), and the share of the layers in its stage",
    DATA: "check the storage of its data and the dataset's `__getitem__`: one thread reads one batch ahead",
    UPDATE: "check the optimizer and its hooks on that rank",
    BETWEEN: "write metrics, evaluate and save less often, or make the step listeners faster",
    EVALUATION: "evaluate less often, or on fewer batches (`[evaluation]`)",
    MESSAGES: "check the network between these stages",
}


def describe_location(location: str) -> str:
    """Returns the description of a location of work: `forward of chunk 0 (F0)` for `F0`."""
    match = re.fullmatch(r"([FBIWC])(\d+)", location)
    if match is None:
        return _LOCATIONS.get(location, location)
    return f"{_ACTIONS[match[1]]} of chunk {match[2]} ({location})"


def describe_cause(cause: Cause) -> str:
    """Returns a sentence that describes the cause, with figures."""
    step = f"in a step of {_format_seconds(cause.step_s)}"
    if cause.kind == "data":
        return f"every rank waits for its data, {_format_seconds(cause.seconds)} {step}"
    usual = _format_seconds(cause.usual_s) if cause.usual_s >= MIN_SHOWN_S else "almost no time"
    work = f"its {describe_location(cause.location)} takes {_format_seconds(cause.seconds)} longer"
    return f"rank {cause.ranks[0]} makes other ranks wait: {work} than on other ranks {step}; those take {usual}"


def remedy(cause: Cause) -> str:
    """Returns the remedy for the cause."""
    return _REMEDIES.get(cause.location, _REMEDIES["F"])


def describe_no_cause(judgement: Judgement) -> str:
    """Returns a sentence that explains why a judgement has no cause."""
    if judgement.why_not:
        return f"unknown: {judgement.why_not}"
    steps = f"steps {judgement.blocks[0].first} to {judgement.blocks[-1].last}"
    message = f"none: in {steps} no rank worked {MIN_SHARE:.0%} of a step longer than its peers"
    is_cuda = any(rank.start.device == "cuda" for rank in judgement.blocks[0].ranks.values())
    caveat = "; these are host times, which show neither a slow GPU nor a host that falls behind within a step"
    return message + (caveat if is_cuda else "")


def describe_last_steps(records: Sequence[WorkRecord]) -> Iterator[str]:
    """Yields a line for each rank with windows: its last recorded step and its work in that window."""
    for record in records:
        if record.windows:
            window = record.windows[-1]
            work = ", ".join(_longest_locations([(location, spent.median) for location, spent in window.work.items()]))
            yield f"rank {record.start.rank} (stage {record.start.stage}): recorded up to step {window.last}: {work}"


def describe_work(judgement: Judgement) -> Iterator[str]:
    """Yields a line for each rank: the medians of its work and its waits in a step."""
    blocks = judgement.blocks
    for rank in blocks[0].ranks if blocks else ():
        works = [block.ranks[rank] for block in blocks]
        locations = [location for location in works[-1].work if location != DEVICE]
        spent = [
            (location, median(work.work[location].median for work in works if location in work.work)) for location in locations
        ]
        longest = ", ".join(_longest_locations(spent))
        text = (
            f"works {_format_seconds(median(work.working_s for work in works))} of a step{f' ({longest})' if longest else ''}"
        )
        waits = [
            (median(work.waiting_s for work in works), "other ranks"),
            (median(work.device_s for work in works), "its device"),
        ]
        waits = [(seconds, awaited) for seconds, awaited in waits if seconds >= MIN_SHOWN_S]
        text += ", waits " + (" and ".join(f"{_format_seconds(s)} for {awaited}" for s, awaited in waits) or "for no rank")
        yield f"rank {rank} (stage {works[0].start.stage}): {text}"


def _longest_locations(spent: Sequence[tuple[str, float]]) -> Iterator[str]:
    """Yields the three locations with the longest times, each with its time."""
    longest = sorted((item for item in spent if item[1] >= MIN_SHOWN_S), key=lambda item: -item[1])[:3]
    yield from (f"{location} {_format_seconds(seconds)}" for location, seconds in longest)


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"

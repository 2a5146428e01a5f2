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
    Queue,
    WorkRecord,
)
from sley_doctor.slow.blocks import Block, median
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
_AXES = {
    "stage": "sums of gradients",
    "wdp": "sums of gradients",
    "all": "loss and norm at a step's end",
    "control": "agreement at a step's beginning",
    "pp": "messages between stages",
    "wp": "gathers and reductions of shards",
    "sp": "exchanges of attention",
}
_REMEDIES = {
    "F": "check the layers of that rank, and its machine: other processes, clock, temperature",
    DATA: "check the storage of its data and the dataset's `__getitem__`: one thread reads one batch ahead",
    UPDATE: "check the optimizer and its hooks on that rank",
    BETWEEN: "write metrics, evaluate and save less often, or make the step listeners faster",
    EVALUATION: "evaluate less often, or on fewer batches (`[evaluation]`)",
    MESSAGES: "check the network between these stages",
    "link": "check the network between these ranks, and the interface that their groups use",
}


def describe_location(location: str) -> str:
    """Returns the description of a location of work: `forward of chunk 0 (F0)` for `F0`."""
    match = re.fullmatch(r"([FBIWC])(\d+)", location)
    if match is None:
        return _LOCATIONS.get(location, location)
    return f"{_ACTIONS[match[1]]} of chunk {match[2]} ({location})"


def describe_cause(cause: Cause) -> str:
    """Returns a sentence that describes the cause, with figures."""
    ranks, step = format_ranks(cause.ranks), f"in a step of {_format_seconds(cause.step_s)}"
    match cause.kind:
        case "work":
            layer = f", in layer `{cause.layer}`," if cause.layer else ""
            usual = _format_seconds(cause.usual_s) if cause.usual_s >= MIN_SHOWN_S else "almost no time"
            work = f"its {describe_location(cause.location)}{layer} takes {_format_seconds(cause.seconds)} longer"
            return f"{ranks} makes other ranks wait: {work} than on other ranks {step}; those take {usual}"
        case "data":
            return f"every rank waits for its data, {_format_seconds(cause.seconds)} {step}"
        case _:
            exchanges = f"the exchanges of `{cause.location}` ({_exchange_type(cause.location)}) between {ranks}"
            expected = f"a slow but working link takes {_format_seconds(cause.usual_s)}"
            return f"{exchanges} take {_format_seconds(cause.seconds)} {step} although no rank is late; {expected}"


def remedy(cause: Cause) -> str:
    """Returns the remedy for the cause."""
    return _REMEDIES.get(cause.kind) or _REMEDIES.get(cause.location) or _REMEDIES["F"]


def describe_no_cause(judgement: Judgement) -> str:
    """Returns a sentence that explains why a judgement has no cause."""
    if judgement.why_not:
        return f"unknown: {judgement.why_not}"
    steps = f"steps {judgement.blocks[0].first} to {judgement.blocks[-1].last}"
    message = f"none: in {steps} no rank worked {MIN_SHARE:.0%} of a step longer than its peers, and no exchange took as long"
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
        yield f"rank {rank} (stage {works[0].start.stage}): {text}{_describe_waits(rank, blocks)}"


def _longest_locations(spent: Sequence[tuple[str, float]]) -> Iterator[str]:
    """Yields the three locations with the longest times, each with its time."""
    longest = sorted((item for item in spent if item[1] >= MIN_SHOWN_S), key=lambda item: -item[1])[:3]
    yield from (f"{location} {_format_seconds(seconds)}" for location, seconds in longest)


def _describe_waits(rank: int, blocks: Sequence[Block]) -> str:
    waits = [
        f"{_format_seconds(seconds)} {description}"
        for seconds, description in longest_waits(rank, blocks)
        if seconds >= MIN_SHOWN_S
    ]
    return f", waits {'; '.join(waits[:3])}" if waits else ", waits for no rank"


def longest_waits(rank: int, blocks: Sequence[Block]) -> list[tuple[float, str]]:
    """Returns the waits of `rank`, the longest first: seconds per step, and a description of the exchange and the awaited rank.
    The awaited rank is the peer of a message, or the member of a collective that waits least.
    """
    works = [block.ranks[rank] for block in blocks]
    waits = [(median(work.work[DEVICE].median for work in works if DEVICE in work.work), "for the device")]
    for name, queue in works[-1].queues.items():
        seconds = median(work.waits[name].median for work in works if name in work.waits)
        ranks = format_ranks(_awaited_ranks(rank, name, queue, blocks))
        waits.append((seconds, f"in `{name}` ({_exchange_type(name)}) for {ranks}"))
    return sorted(waits, key=lambda wait: -wait[0])


def _awaited_ranks(rank: int, name: str, queue: Queue, blocks: Sequence[Block]) -> tuple[int, ...]:
    """Returns the awaited ranks of a queue: the peer of messages, or the member of a collective that waits least."""
    if queue.peer is not None:
        return (queue.peer,)
    members = [member for member in queue.ranks if member != rank and member in blocks[-1].ranks]
    # The wait of each member in the queue, or in all its queues if it has no such queue.
    wait_s = {
        member: median(
            rank.waits[name].median if name in rank.waits else rank.waiting_s + rank.device_s
            for rank in (block.ranks[member] for block in blocks)
        )
        for member in members
    }
    return (
        (min(wait_s, key=lambda member: wait_s[member]),)
        if wait_s
        else tuple(member for member in queue.ranks if member != rank)
    )


def _exchange_type(name: str) -> str:
    return _AXES.get(name.split()[0], "exchanges")


def format_ranks(ranks: Sequence[int]) -> str:
    """Returns `rank 1` for one rank, `ranks 0, 1` for several."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _format_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"

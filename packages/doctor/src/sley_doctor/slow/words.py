"""Puts the judgement into words: a line for the cause, what to do, and a line for each rank."""

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
from sley_doctor.slow.blocks import Block, middle
from sley_doctor.slow.judge import LEAST_SHARE, Cause, Judgement

SHOWN_S = 5e-5  # what takes less is not shown

_ACTIONS = {
    "F": "forward",
    "B": "backward",
    "I": "backward for inputs",
    "W": "backward for weights",
    "C": "start of the gradients' reduction",
}
_PLACES = {
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
    "F": "look at what that rank's layers do there, and at its machine: other processes, clock, temperature",
    DATA: "look at where its data lies and at the data set's `__getitem__`: samples are read ahead, one batch, by one thread",
    UPDATE: "look at the optimizer, and at what its hooks do on that rank",
    BETWEEN: "write metrics, evaluate and save less often, or make what listens to steps faster",
    EVALUATION: "evaluate less often, or on fewer batches (`[evaluation]`)",
    MESSAGES: "look at the network between these stages",
    "link": "look at the network between these ranks, and whether their groups use the interface that you mean",
    "change": "look at what that rank's machine has done since: other processes, clock, temperature, memory",
    "memory": "look for what is kept from step to step: lists of tensors, losses with their graphs, caches without a limit",
    "faults": "it takes memory from the system anew in each step: look for large buffers that are made and freed, and for a "
    "shortage of memory",
}


def place_in_words(place: str) -> str:
    """Returns a place of work as a person reads it: `F0` is the forward of chunk 0."""
    found = re.fullmatch(r"([FBIWC])(\d+)", place)
    if found is None:
        return _PLACES.get(place, place)
    return f"{_ACTIONS[found[1]]} of chunk {found[2]} ({place})"


def cause_in_words(cause: Cause) -> str:
    """Returns the cause as one sentence, with figures."""
    whose, step = ranks_in_words(cause.ranks), f"in a step of {_ms(cause.step_s)}"
    match cause.kind:
        case "work":
            layer = f", in layer `{cause.layer}`," if cause.layer else ""
            usual = f"others take {_ms(cause.usual_s)}" if cause.usual_s >= SHOWN_S else "others take next to nothing"
            longer = f"its {place_in_words(cause.place)}{layer} takes {_ms(cause.seconds)} longer than others' {step}"
            faults = f", with {cause.faults:,.0f} page faults more" if cause.faults else ""
            return f"{whose} makes others wait: {longer}; {usual}{faults}"
        case "data":
            return f"every rank waits for its data, {_ms(cause.seconds)} {step}"
        case "link":
            what = f"the exchanges of `{cause.place}` ({_exchange(cause.place)}) between {whose}"
            sound = f"a slow but sound link takes {_ms(cause.usual_s)}"
            return f"{what} take {_ms(cause.seconds)} {step} although no rank is late; {sound}"
        case "change":
            more = f"takes {_ms(cause.seconds)} more than the {_ms(cause.usual_s)} of before, {step}"
            return f"{whose} has become slower: its {place_in_words(cause.place)} {more}"
        case _:
            where = "on the host" if cause.place == "host" else "on the device"
            return f"the memory of {whose} {where} grows: {cause.megabytes:,.0f} MiB in steps {cause.first} to {cause.last}"


def remedy(cause: Cause) -> str:
    """Returns what to do against the cause."""
    if cause.faults:
        return _REMEDIES["faults"]
    return _REMEDIES.get(cause.kind) or _REMEDIES.get(cause.place) or _REMEDIES["F"]


def nobody(judgement: Judgement) -> str:
    """Returns the sentence for a judgement without a cause: why there is none."""
    if judgement.why_not:
        return f"cannot be told: {judgement.why_not}"
    steps = f"steps {judgement.blocks[0].first} to {judgement.blocks[-1].last}"
    told = f"none: in {steps} no rank worked {LEAST_SHARE:.0%} of a step longer than its peers, and no exchange took that much"
    is_cuda = any(rank.start.device == "cuda" for rank in judgement.blocks[0].ranks.values())
    unseen = "; these are the hosts' seconds, in which neither a slow GPU nor a host late within a step is seen"
    return told + (unseen if is_cuda else "")


def last_seen(records: Sequence[WorkRecord]) -> Iterator[str]:
    """Yields a line for each rank that has recorded anything, with the last step that it recorded."""
    for record in records:
        if record.windows:
            window = record.windows[-1]
            work = ", ".join(_works([(place, spent.middle) for place, spent in window.work.items()]))
            yield f"rank {record.start.rank} (stage {record.start.stage}): recorded up to step {window.last}: {work}"


def work_in_words(judgement: Judgement) -> Iterator[str]:
    """Yields a line for each rank: its work and its waits in a step in the middle of the run."""
    blocks = judgement.blocks
    for rank in blocks[0].ranks if blocks else ():
        own = [block.ranks[rank] for block in blocks]
        places = [place for place in own[-1].work if place != DEVICE]
        spent = [(place, middle(one.work[place].middle for one in own if place in one.work)) for place in places]
        most = ", ".join(_works(spent))
        work = f"works {_ms(middle(one.working_s for one in own))} of a step{f' ({most})' if most else ''}"
        yield f"rank {rank} (stage {own[0].start.stage}): {work}{_waits(rank, blocks)}"


def _works(spent: Sequence[tuple[str, float]]) -> Iterator[str]:
    """Yields the places that take most of a step, in words."""
    most = sorted((one for one in spent if one[1] >= SHOWN_S), key=lambda one: -one[1])[:3]
    yield from (f"{place} {_ms(seconds)}" for place, seconds in most)


def _waits(rank: int, blocks: Sequence[Block]) -> str:
    told = [f"{_ms(seconds)} {what}" for seconds, what in waits_of(rank, blocks) if seconds >= SHOWN_S]
    return f", waits {'; '.join(told[:3])}" if told else ", waits for nobody"


def waits_of(rank: int, blocks: Sequence[Block]) -> list[tuple[float, str]]:
    """Returns the waits of `rank`, the longest first: seconds of a step, and in words the exchange and the rank waited for. For
    a message that is its other end; for a collective, the member that waits least.
    """
    own = [block.ranks[rank] for block in blocks]
    found = [(middle(one.work[DEVICE].middle for one in own if DEVICE in one.work), "for the device")]
    for name, queue in own[-1].queues.items():
        seconds = middle(one.waits[name].middle for one in own if name in one.waits)
        whom = ranks_in_words(_for_whom(rank, name, queue, blocks))
        found.append((seconds, f"in `{name}` ({_exchange(name)}) for {whom}"))
    return sorted(found, key=lambda one: -one[0])


def _for_whom(rank: int, name: str, queue: Queue, blocks: Sequence[Block]) -> tuple[int, ...]:
    """Returns the ranks for which a rank waits in a queue: the peer of messages, or the member that itself waits least."""
    if queue.peer is not None:
        return (queue.peer,)
    others = [one for one in queue.ranks if one != rank and one in blocks[-1].ranks]
    # How long each waits in the queue, or in all of its own queues where this is none of them.
    waited = {
        one: middle(
            rank.waits[name].middle if name in rank.waits else rank.waiting_s + rank.device_s
            for rank in (block.ranks[one] for block in blocks)
        )
        for one in others
    }
    return (min(waited, key=lambda one: waited[one]),) if waited else tuple(one for one in queue.ranks if one != rank)


def _exchange(name: str) -> str:
    return _AXES.get(name.split()[0], "exchanges")


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Returns ranks in words: `rank 1`, or `ranks 0, 1`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"

"""Tabulates who waited for whom over a run: each rank's work and waits, and the ranks that are named as slow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from sley_doctor.reports.work_record import DATA, DEVICE, UPDATE, WorkRecord
from sley_doctor.slow.blocks import Block, middle
from sley_doctor.slow.judge import judge
from sley_doctor.slow.words import SHOWN_S, cause_in_words, nobody, remedy, waits_of

KINDS: Mapping[str, str] = {
    DATA: "data",
    "F": "forward",
    "BD": "backward",
    "W": "backward for weights",
    UPDATE: "update",
}
"""Places that a column adds up, by name or by the first letter of actions; what is left is the column `else`."""

MOST_RANKS = 32


class WaitingRow(NamedTuple):
    """One rank, in seconds of a step. work: by the kinds of `KINDS`, and what is left. waits: the longest, in words."""

    rank: int
    stage: int
    work: Sequence[float]
    waiting_s: float
    waits: Sequence[str]


class WaitingFigure(NamedTuple):
    """One run. told: causes in words, with what to do; or that there is none. rows: those ranks first that wait least."""

    label: str
    told: Sequence[str]
    rows: Sequence[WaitingRow]
    note: str = ""


def waiting(label: str, records: Sequence[WorkRecord]) -> WaitingFigure:
    """Returns who waited for whom in a run whose ranks have left `records`."""
    judged = judge(records)
    told = [f"{cause_in_words(cause)}; {remedy(cause)}" for cause in judged.causes] or [nobody(judged)]
    blocks = judged.blocks
    rows = sorted((_row(rank, blocks) for rank in blocks[0].ranks), key=lambda row: row.waiting_s) if blocks else []
    note = f"Of {len(rows)} ranks the {MOST_RANKS} that wait least." if len(rows) > MOST_RANKS else ""
    return WaitingFigure(label, told, rows[:MOST_RANKS], note)


def _row(rank: int, blocks: Sequence[Block]) -> WaitingRow:
    """Returns one rank's row of the table: seconds of work by kind, seconds of waiting, and the longest waits."""
    own = [block.ranks[rank] for block in blocks]
    names = [place for place in own[-1].work if place != DEVICE]
    places = {place: middle(one.work[place].middle for one in own if place in one.work) for place in names}
    kinds = [sum(seconds for place, seconds in places.items() if _is_of(place, kind)) for kind in KINDS]
    waits = waits_of(rank, blocks)
    return WaitingRow(
        rank,
        own[0].start.stage,
        [*kinds, sum(places.values()) - sum(kinds)],
        sum(seconds for seconds, _ in waits),
        list(_longest(waits)),
    )


def _is_of(place: str, kind: str) -> bool:
    return place == kind or (kind.isupper() and place[0] in kind)


def _longest(waits: Sequence[tuple[float, str]]) -> Iterator[str]:
    yield from (f"{seconds * 1e3:.3g} ms {words}" for seconds, words in waits[:2] if seconds >= SHOWN_S)

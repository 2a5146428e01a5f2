"""Schedules as text: the CSV form of torch.distributed.pipelining, a row per rank and an action per cell.

    0F0,0F1,,1F0,1I0,1W0,...        `1I0`: input gradients of model part 1 (counted along the model), micro-batch 0

F and B are forward and full backward, I and W the halves of a split one; an empty cell is a wait.
`(0F4;1B2)OVERLAP_F_B` is read as its actions one after another. Sends and receives are not read: `lower` writes its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from sley_core.api.actions import Action, Kind, Placement
from sley_core.errors import Place, PlanError

LETTERS = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.INPUT_GRADIENT, "W": Kind.WEIGHT_GRADIENT}
WORDS = {kind: letter for letter, kind in LETTERS.items()}
CELL = re.compile(r"([0-9]{1,6})([FBIW])([0-9]{1,6})")
OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")

Parsed = tuple[int, Kind, int]
"""Position, kind, micro-batch."""


def write_csv(lists: Sequence[Sequence[Action]], placement: Placement) -> str:
    """Returns the text of compute lists, one line per stage, without waits."""
    rows = [
        [f"{placement.position(stage, action.chunk)}{WORDS[action.kind]}{action.micro}" for action in actions]
        for stage, actions in enumerate(lists)
    ]
    return "".join(",".join(row) + "\n" for row in rows)


def read_csv(text: str, name: str) -> tuple[Placement, list[list[Action]]]:
    """Returns the placement and the lists in `text`. name: of the file, for error messages.

    Does not check that the lists form a valid step: `lower` does. Raises PlanError "schedule-file" with line and
    column.
    """
    rows = [_row(line, name, number) for number, line in enumerate(text.splitlines(), start=1)]
    if not any(rows):
        raise _wrong("has no actions", Place(name))
    placement = _placement([{position for position, _, _ in row} for row in rows], Place(name))
    chunks = [{placement.position(stage, chunk): chunk for chunk in range(placement.chunks)} for stage in range(len(rows))]
    lists = [[Action(kind, chunks[stage][position], micro) for position, kind, micro in row] for stage, row in enumerate(rows)]
    return placement, lists


def read_file(path: Path) -> tuple[Placement, list[list[Action]]]:
    """Returns `read_csv` of a file. Raises PlanError "schedule-file" also if it cannot be read."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _wrong(f"cannot be read: {error}", Place(str(path))) from error
    return read_csv(text, str(path))


def _row(line: str, name: str, number: int) -> list[Parsed]:
    """Returns the actions in one line, overlapped ones one after another. number: of the line, from 1."""
    found: list[Parsed] = []
    start = 0
    for cell in line.split(","):
        overlapped = OVERLAP.fullmatch(cell.strip())
        for part in overlapped[1].split(";") if overlapped else [cell]:
            if word := part.strip():
                found.append(_word(word, Place(name, number, line.index(word, start) + 1)))
        start += len(cell) + 1
    return found


def _word(word: str, place: Place) -> Parsed:
    """Returns one parsed cell. Raises PlanError "schedule-file" if it is no compute action."""
    match = CELL.fullmatch(word)
    if match is None:
        raise _wrong(f"has `{word}`, which is no compute action such as `0F0`, `1B3`, `1I3` or `1W3`", place)
    return int(match[1]), LETTERS[match[2]], int(match[3])


def _placement(held: Sequence[set[int]], place: Place) -> Placement:
    """Returns the placement in which rank i holds positions `held[i]`; raises PlanError if that is none."""
    holders = {position: rank for rank, positions in enumerate(held) for position in positions}
    told = "; ".join(f"rank {rank}: {sorted(positions)}" for rank, positions in enumerate(held[:8]))
    if len(holders) != sum(map(len, held)) or sorted(holders) != list(range(len(holders))):
        raise _wrong(f"does not give each part of the model, counted from 0, to one rank ({told})", place)
    if len({len(positions) for positions in held}) > 1:
        raise _wrong(f"does not give every rank equally many parts of the model ({told})", place)
    return Placement(tuple(holders[position] for position in range(len(holders))))


def _wrong(fault: str, place: Place) -> PlanError:
    """Returns the PlanError "schedule-file"."""
    return PlanError("schedule-file", f"the schedule {place} {fault}", path=("pipeline", "file"))

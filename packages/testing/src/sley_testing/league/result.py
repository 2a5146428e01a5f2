"""Judges from the findings of its ranks whether a row of the league holds, as text and as JSON. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sley_testing.league.row import LeagueRow
from sley_testing.verify.findings import Kind, Limits, RankFindings, as_number, differences, in_words, worst

SHOWN: tuple[Kind, ...] = ("loss", "gradient norm", "gradient", "weight")
"""The kinds that the table has a column for. First values must be equal bit for bit, and are told only where they are not; a
held-out loss counts as a loss."""


@dataclass(frozen=True)
class Result:
    """Holds the largest relative errors of a row, over all ranks, steps and parameters.

    errors: beside one process, by kind. plain: the largest of any kind beside the plain loop; None where the row has none.
    differs: where it does not hold, the lines that say what differs first. failed: why it could not be compared.
    """

    row: LeagueRow
    errors: dict[Kind, float] = field(default_factory=dict)
    plain: float | None = None
    differs: tuple[str, ...] = ()
    failed: str = ""

    @property
    def holds(self) -> bool:
        """Whether nothing is beyond the row's limit."""
        return not self.differs and not self.failed


def judged(row: LeagueRow, alone: Sequence[RankFindings], plain: Sequence[RankFindings] | None) -> Result:
    """Returns the result of a row. alone: findings of its ranks beside one process; plain: beside the plain loop, if it has
    one.
    """
    limits = Limits(row.limit, row.limit)
    found = {one.kind: one.error for one in worst(alone, limits)}
    found["loss"] = max(found["loss"], found.get("held-out loss", 0.0))
    errors = {kind: found[kind] for kind in SHOWN if kind in found}
    beside_plain = None if plain is None else max(one.error for one in worst(plain, limits))
    return Result(row, errors, beside_plain, tuple(_differs(row, alone, plain or (), limits)))


def _differs(row: LeagueRow, alone: Sequence[RankFindings], plain: Sequence[RankFindings], limits: Limits) -> list[str]:
    """Returns what differs first from one process, or else from the plain loop; nothing where the row holds."""
    for what, found in (("one process", alone), ("the plain loop", plain)):
        if differences(found, limits):
            lines = list(in_words(found, limits, row.num_steps))
            return [f"beside {what} it {lines[0]}", *lines[1 : lines.index("")]]
    return []


def in_lines(results: Sequence[Result]) -> Iterator[str]:
    """Yields a table of the largest relative errors, two lines a row: the numbers, and what goes wrong elsewhere.

    A row that does not hold is followed by what differs first, and named again at the end.
    """
    heads = (*(kind.removeprefix("gradient ") for kind in SHOWN), "plain loop", "allowed")
    yield f"{'largest error':<18}" + "".join(f"{head:>12}" for head in heads)
    for one in results:
        numbers = (*(one.errors.get(kind) for kind in SHOWN), one.plain, one.row.limit)
        cells = "".join(f"{'' if number is None else f'{number:.2g}':>12}" for number in numbers)
        yield f"{one.row.name:<18}{cells}  {'holds' if one.holds else 'DOES NOT HOLD'}"
        yield f"  {one.row.layout}"
        seen = f" ({', '.join(one.row.seen)})" if one.row.seen else ""
        yield f"  elsewhere: {one.row.elsewhere}{seen}"
        yield from (f"  {line}" for line in one.differs)
        if one.failed:
            yield f"  could not be compared: {one.failed}"
    yield ""
    wrong = [one.row.name for one in results if not one.holds]
    if wrong:
        yield f"{len(wrong)} of {len(results)} rows do not hold: {', '.join(wrong)}"
    else:
        yield f"all {len(results)} rows hold" if len(results) > 1 else f"{results[0].row.name} holds"


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """Returns the results as JSON; an error of null is no finite number."""
    return {"holds": all(one.holds for one in results), "rows": [_row(one) for one in results]}


def _row(one: Result) -> dict[str, Any]:
    row = one.row
    return {
        "name": row.name,
        "elsewhere": row.elsewhere,
        "seen": list(row.seen),
        "layout": row.layout,
        "ranks": row.num_ranks,
        "steps": row.num_steps,
        "allowed": row.limit,
        "errors": {kind: as_number(error) for kind, error in one.errors.items()},
        "has_plain_loop": row.plain,
        "plain_loop": None if one.plain is None else as_number(one.plain),
        "holds": one.holds,
        "differs": list(one.differs),
        "failed": one.failed or None,
    }

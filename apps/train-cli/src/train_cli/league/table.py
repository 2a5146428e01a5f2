"""Formats the league's results as lines of text and as JSON. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from train_cli.league.result import SHOWN, Result
from train_cli.verify.findings import as_number


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

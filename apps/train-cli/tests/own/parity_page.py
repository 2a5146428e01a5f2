"""The part of docs/parity.md about the league, which `nox -s campaign -- -k league_is_written` writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[4] / "docs" / "parity.md"

_LEAGUE = "## The league of silent errors\n"

_INTRODUCTION = """
<!-- Written by `nox -s campaign -- -k league_is_written`; do not edit. -->

`train-cli verify --league` tests the field's known silent errors, one by one: a small plan in the layout in which others
compute something else without an error, compared with one process of the same plan and, where there is one, with a plain
PyTorch loop that shares nothing with the engine: its own sums, torch's optimizer and clipping, one document after the other.
The table has the largest relative error of each kind over all ranks, steps and parameters. A held-out loss counts as a loss.
An arrow means that a run is resumed from a checkpoint in another layout.

Each row can fail: for each, a test injects a fault of its kind into the ranks, and the row reports it. In bf16 the tolerance
is the one that [the design](internals.md#parity) promises, since a weight may be rounded to its neighbour.

| Row | Layout | Loss | Norm | Gradient | Weight | Plain loop | Allowed |
|---|---|---|---|---|---|---|---|
"""

_ELSEWHERE = """
What goes wrong elsewhere, and where it was reported:

| Row | Elsewhere | Seen in |
|---|---|---|
"""


def league() -> str:
    """Returns the part about the league, with its heading."""
    return "".join(PAGE.read_text("utf-8").partition(_LEAGUE)[1:])


def write_league(told: Mapping[str, Any]) -> None:
    """Writes the output of `train-cli verify --league --format json` into the part about the league."""
    rows = "".join(_figures(row) for row in told["rows"])
    elsewhere = "".join(f"| `{row['name']}` | {row['elsewhere']} | {', '.join(row['seen'])} |\n" for row in told["rows"])
    PAGE.write_text(
        f"{PAGE.read_text('utf-8').partition(_LEAGUE)[0]}{_LEAGUE}{_INTRODUCTION}{rows}{_ELSEWHERE}{elsewhere}", "utf-8"
    )


def _figures(row: Mapping[str, Any]) -> str:
    kinds = ("loss", "gradient norm", "gradient", "weight")
    numbers = [*(row["errors"][kind] for kind in kinds), row["plain_loop"], row["allowed"]]
    cells = ["" if number is None else f"{number:.1e}" for number in numbers]
    return f"| `{row['name']}` | {row['layout']} | {' | '.join(cells)} |\n"

"""The league of silent errors: its rows hold, and each says so where its fault is put in; the command and its page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from league_faults import FAULTS, fault

from sley_core.comm.world import World
from sley_testing.league.rows import ROWS, LeagueRow, RowResult
from sley_testing.league.verify import compare_rows, verify_rows
from sley_testing.plans import changed
from sley_testing.verify import measure

SAMPLE = ("packed-sp", "resume-wp", "tied-stages")
"""Rows whose faults CI puts in; a campaign puts in all."""

Played = Callable[..., list[RowResult]]

PAGE = Path(__file__).parents[3] / "docs" / "parity.md"
LEAGUE = "## The league of silent errors\n"


def on_a_rank(rows: Sequence[LeagueRow], folder: Path, faulty: str | None) -> None:
    with fault(faulty) if faulty else nullcontext(), World.join("cpu") as world:
        compare_rows(rows, world, folder)


def forked(ranks: Any, faulty: str | None, rows: Sequence[LeagueRow], num_ranks: int, folder: Path) -> str:
    """As the command starts ranks, but forked."""
    if num_ranks > 1:
        ranks(num_ranks, 120)(on_a_rank, rows, folder, faulty)
    else:
        on_a_rank(rows, folder, faulty)
    return ""


@pytest.fixture
def played(ranks: Any, tmp_path: Path) -> Played:
    """`played(row, ..., faulty=None)`: the results of rows, with a fault on their ranks or without."""

    def play_rows(*rows: LeagueRow, faulty: str | None = None) -> list[RowResult]:
        return list(verify_rows(rows, tmp_path, partial(forked, ranks, faulty)))

    return play_rows


def row(name: str) -> LeagueRow:
    return next(one for one in ROWS if one.name == name)


def test_every_row_has_a_name_of_its_own_and_a_fault() -> None:
    assert len({one.name for one in ROWS}) == len(ROWS)
    assert set(FAULTS) == {one.name for one in ROWS}


def test_a_sample_of_rows_holds(played: Played) -> None:
    found = played(*(row(name) for name in ("packed-sp", "resume-pp")))
    assert [one.row.name for one in found if not one.holds] == []
    assert {len(one.errors) for one in found} == {4}
    assert all((one.plain_loop_error or 0.0) > 0 for one in found), "the plain loop adds in another order"


def figures(row: Mapping[str, Any]) -> str:
    numbers = [row["errors"][kind] for kind in ("loss", "gradient norm", "gradient", "weight")]
    cells = ["" if number is None else f"{number:.1e}" for number in (*numbers, row["plain_loop"], row["allowed"])]
    return f"| `{row['name']}` | {row['layout']} | {' | '.join(cells)} |\n"


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_the_whole_league_is_written(cli: Any) -> None:
    """Plays all rows as the command does, and writes its part of the page."""
    result = cli("verify", "--league", "--format", "json")
    assert result.code == 0, result.out
    rows = json.loads(result.out)["rows"]
    elsewhere = (f"| `{row['name']}` | {row['elsewhere']} | {', '.join(row['seen'])} |\n" for row in rows)
    tables = iter(["".join(map(figures, rows)), "".join(elsewhere)])
    before, title, part = PAGE.read_text("utf-8").partition(LEAGUE)
    part = re.sub(r"(\|(?:---\|)+\n)(?:\|.*\n)*", lambda match: match[1] + next(tables), part)
    PAGE.write_text(before + title + part, "utf-8")


@pytest.mark.sample(1)
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name", [pytest.param(one.name, marks=[] if one.name in SAMPLE else pytest.mark.campaign) for one in ROWS]
)
def test_a_row_says_so_where_its_fault_is_put_in(played: Played, name: str) -> None:
    (found,) = played(row(name), faulty=name)
    assert not found.failure
    assert not found.holds, found
    assert found.differences[0].startswith("compared with one process, it differs: "), found.differences


@pytest.mark.parametrize("what", ["full_weights", "_unclipped"])
def test_what_no_rank_compares_does_not_hold(ranks: Any, tmp_path: Path, what: str) -> None:
    def without_norms(rows: Sequence[LeagueRow], num_ranks: int, folder: Path) -> str:
        whole = getattr(measure, what)

        def part(*given: Any) -> dict[str, Any]:
            return {name: one for name, one in whole(*given).items() if "norm" not in name}

        with patch.object(measure, what, part):
            return forked(ranks, None, rows, num_ranks, folder)

    (found,) = verify_rows([row("accumulation")], tmp_path, without_norms)
    kind = "first value" if what == "full_weights" else "gradient"
    assert found.failure == f"no rank has the {kind} of `blocks.0.attention_norm.weight` (of 5 such parameters)"


def test_the_command_fails_where_a_row_does_not_hold(cli: Any) -> None:
    with fault("accumulation"):
        result = cli("verify", "--league", "--rows", "accumulation")
    assert result.code == 1, result.err
    assert "DOES NOT HOLD" in result.out
    assert "  compared with one process, it differs: the loss, since step 1, on stage 0 (rank 0)\n" in result.out
    assert result.out.endswith("1 of 1 rows do not hold: accumulation\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "verify-what"),
        (("plan.toml", "--league"), "verify-what"),
        (("--league", "--steps", 2), "verify-what"),
        (("--league", "--rows", "acumulation"), "league-rows"),
    ],
)
def test_what_names_neither_plan_nor_league_is_refused(
    cli: Any, folder: Path, arguments: tuple[object, ...], said: str
) -> None:
    result = cli("verify", *arguments)
    assert (result.code, f"error[{said}]" in result.err) == (2, True), result.err


def test_a_plugin_that_a_row_needs_is_named_before_anything_runs(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = replace(row("accumulation"), tables=changed(row("accumulation").tables, pipeline={"use": "absent.schedule"}))
    monkeypatch.setattr("sley_testing.league.rows.ROWS", (lacking,))
    result = cli("verify", "--league")
    assert (result.code, "error[plugin-unknown]" in result.err) == (4, True), result.err


def test_the_page_has_every_row_and_what_is_allowed() -> None:
    parts = PAGE.read_text("utf-8").partition(LEAGUE)[2].split("in other programs, and")
    measured, elsewhere = (re.findall(r"^\| `(\S+)` \| (.+) \|$", part, re.MULTILINE) for part in parts)
    assert [(name, cells.split(" | ")[0]) for name, cells in measured] == [(one.name, one.layout) for one in ROWS]
    assert [float(cells.split(" | ")[-1]) for _, cells in measured] == [float(f"{one.limit:.1e}") for one in ROWS]
    assert [(name, cells.split(" | ")[0]) for name, cells in elsewhere] == [(one.name, one.silent_error) for one in ROWS]

"""A program's calls between steps, drawn: steps, moves, saves, loads, writes, freezes, evaluations, kills, in any order.

They equal a plain loop, or are refused by name while memory is away; none ends a process. A failure prints its case, and
`drawn(NUMBER)` makes it again.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_calls import LAYOUTS, OPTIMIZERS, Case, drawn, judge, made, plain_loop

SAMPLE = (14, 18, 25, 63)
"""Cases with calls while memory is away."""

CAMPAIGN = 10
"""Parts of 20 cases, of numbers of their own in each run."""


def check(ranks: Any, numbers: Iterable[int], texts: Path, folder: Path) -> int:
    """Draws, makes and judges these cases; returns how many calls were refused."""
    return check_cases(ranks, [drawn(number) for number in numbers], texts, folder)


def check_cases(ranks: Any, cases: Sequence[Case], texts: Path, folder: Path) -> int:
    """Makes and judges these cases; returns how many calls were refused."""
    num_refused = 0
    for world in sorted({case.world for case in cases}):
        same = [case for case in cases if case.world == world]
        loops = [plain_loop(case, texts) for case in same]
        shapes = {name: tuple(one.shape) for name, one in loops[0].masters.items()}
        every = ranks(world, 60 + 20 * len(same))(made, same, folder, texts, shapes)
        for at, (case, loop) in enumerate(zip(same, loops, strict=True)):
            try:
                num_refused += judge(case, loop, [rank[at] for rank in every])
            except AssertionError as error:
                raise AssertionError(f"{case}\n{error}") from error
    return num_refused


@pytest.mark.parametrize("number", SAMPLE)
def test_a_fixed_sample_equals_a_plain_loop(ranks: Any, texts: Path, tmp_path: Path, number: int) -> None:
    assert check(ranks, [number], texts, tmp_path) > 0, "nothing is refused"


AWAY = ("offload", True)
BACK = ("onload", False, "weights", "buffers", "masters", "optimizer_states", "handlers")
HARD: dict[str, tuple[str, str, str, int | None, list[Any]]] = {
    "saved while weights are away and masters at home": ("alone", "on the host", "bf16", None, [AWAY, ("save",), ("kill",)]),
    "saved while weights come": (
        "alone",
        "on the host",
        "bf16",
        1,
        [("offload", False), ("onload", False), ("save",), ("kill",)],
    ),
    "loaded while gradients are away": (
        "dp bucketed",
        "everything",
        "fp64",
        None,
        [("step", 1), ("save",), AWAY, BACK, ("load", 0)],
    ),
    "pointed elsewhere before it left": (
        "alone",
        "everything",
        "bf16",
        None,
        [("write", 0.3, "data"), AWAY, ("save",), ("kill",)],
    ),
    "written, and read as masters": ("alone", "on the host", "fp64", None, [("write", 0.3, "copy"), ("host", "masters")]),
}
"""Sequences that ended a process, or had wrong numbers: layout, what moves, precision, order of copies, calls."""


@pytest.mark.parametrize("name", HARD)
def test_a_hard_sequence_equals_a_plain_loop(ranks: Any, texts: Path, tmp_path: Path, name: str) -> None:
    layout, offload, compute, order, calls = HARD[name]
    end: list[Any] = [("onload", False), ("step", 100)]
    case = Case(0, LAYOUTS[layout][0], layout, offload, compute, OPTIMIZERS[0], order, [("step", 0), *calls, *end])
    check_cases(ranks, [case], texts, tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize("part", range(CAMPAIGN))
def test_two_hundred_sequences_equal_a_plain_loop(ranks: Any, texts: Path, tmp_path: Path, part: int) -> None:
    first = random.SystemRandom().randrange(10**6) * 1000
    print(f"numbers {first} to {first + 19}")
    num_refused = check(ranks, range(first, first + 20), texts, tmp_path)
    print(f"{num_refused} calls were refused")


def test_a_wrong_number_is_seen(texts: Path, tmp_path: Path) -> None:
    """A loop that writes another value does not pass."""
    torch.manual_seed(0)
    case = next(one for one in map(drawn, range(1000)) if one.world == 1 and one.compute == "fp64")
    case = Case(0, 1, "alone", "everything", "fp64", case.optimizer, None, [("step", 0), ("write", 0.3, "copy")])
    loop = plain_loop(case, texts)
    found = made([case], tmp_path, texts, {name: tuple(one.shape) for name, one in loop.masters.items()})
    judge(case, loop, found)
    found[0]["log"][1] = ("done", None)
    with pytest.raises(AssertionError, match="at the end: off by"):
        judge(case, plain_loop(case, texts), found)

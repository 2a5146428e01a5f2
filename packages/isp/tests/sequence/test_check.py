"""Sizes that cannot be split are refused without torch, with the equation that fails and what would do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import changed, small_plan

PLAN = small_plan(model__hidden=24, model__heads=6, sequence={"use": "isp.all_to_all"})


Problems = Callable[..., list[tuple[str, str, str | None]]]


@pytest.fixture
def problems(texts: Path) -> Problems:
    """`problems(sp, world=None, **changes)`: code, message and hint of what is wrong with the plan."""

    def problems(sp: int, world: int | None = None, **changes: Any) -> list[tuple[str, str, str | None]]:
        plan = plan_from_dict(changed(PLAN, parallel={"sp": sp}, **changes), texts)
        return [(one.code, one.message, one.hint) for one in check_plan(plan, world or plan.world())]

    return problems


@pytest.mark.parametrize("sp", [1, 2, 3, 6])
def test_what_divides_is_allowed(problems: Problems, sp: int) -> None:
    """Two key heads, and 2, 3 or 6 ranks: they are copied where it takes that."""
    assert problems(sp) == []


def test_heads_that_do_not_divide(problems: Problems) -> None:
    message = "heads = sp x heads per rank fails: 6 is no multiple of 4"
    assert problems(4) == [("sequence-heads", message, "with 6 heads `sp` can be 1, 2, 3")]


def test_every_equation_at_once(problems: Problems) -> None:
    assert [code for code, _, _ in problems(4, data__sequence=25)] == ["sequence-does-not-divide", "sequence-heads"]


def test_a_world_that_does_not_divide(problems: Problems) -> None:
    ((code, message, _),) = problems(2, world=3)
    assert code == "layout"
    assert message == "world = pp x dp x sp fails: 3 is no multiple of 1 x 2"

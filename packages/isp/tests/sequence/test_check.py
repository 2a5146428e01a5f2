"""Sizes that cannot be split are refused without torch, with the equation that fails and what would do."""

from __future__ import annotations

from typing import Any

import pytest

from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict

TABLES: dict[str, Any] = {
    "run": {"name": "sizes", "steps": 1},
    "model": {"use": "core.llama", "num_layers": 1, "hidden": 24, "heads": 6, "kv_heads": 2},
    "data": {"use": "core.text", "source": "python-stdlib", "sequence": 24},
    "batch": {"global_size": 2, "micro_size": 1},
    "optimizer": {"use": "core.sgd", "lr": 0.1},
    "sequence": {"use": "isp.all_to_all"},
}


def problems(sp: int, world: int | None = None, **tables: Any) -> list[tuple[str, str, str | None]]:
    plan = plan_from_dict({**TABLES, "parallel": {"sp": sp}, **tables})
    return [(one.code, one.message, one.hint) for one in check_plan(plan, world or plan.world())]


@pytest.mark.parametrize("sp", [1, 2, 3, 6])
def test_what_divides_is_allowed(sp: int) -> None:
    """Two key heads, and 2, 3 or 6 ranks: they are copied where it takes that."""
    assert problems(sp) == []


def test_heads_that_do_not_divide() -> None:
    message = "heads = sp x heads per rank fails: 6 is no multiple of 4"
    assert problems(4) == [("sequence-heads", message, "with 6 heads `sp` can be 1, 2, 3")]


def test_every_equation_at_once() -> None:
    data = TABLES["data"] | {"sequence": 25}
    assert [code for code, _, _ in problems(4, data=data)] == ["sequence-does-not-divide", "sequence-heads"]


def test_a_world_that_does_not_divide() -> None:
    ((code, message, _),) = problems(2, world=3)
    assert code == "layout"
    assert message == "world = pp x dp x sp fails: 3 is no multiple of 1 x 2"

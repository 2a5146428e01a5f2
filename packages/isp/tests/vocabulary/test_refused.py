"""Losses and models that cannot share their vocabulary are refused: by the plan, on meta, or in the first forward."""

from __future__ import annotations

from typing import Any

import pytest

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import PlanError, RunError
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict

SHARED = {"head": "vocabulary"}
OWN_DATA = {"data": {"factory": "scored:Labelled"}}


def test_another_loss(own, sharded, texts):
    """Found by `check`, without torch."""
    tables = sharded(2, weights=SHARED, loss={"factory": "isp_parts:Squares"})
    (problem,) = check_plan(plan_from_dict(tables, texts), 2)
    assert problem.code == "head-loss"
    assert "`isp_parts:Squares` takes all logits of a token" in problem.message
    assert check_plan(plan_from_dict(sharded(2, weights=SHARED), texts), 2) == []


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("doubled", "found: `first`, `second`"),
        ("held_elsewhere", "`table` holds the head's weight too"),
        ("no_linear", "found: none"),
    ],
)
def test_another_head(own, sharded, factory, message):
    """Found on meta, on every rank of any stage: what `check --model` says."""
    tables = sharded(2, weights=SHARED, model={"factory": f"scored:{factory}"}, **OWN_DATA)
    plan = plan_from_dict(tables, own)
    with World.fake(0, 2) as world, pytest.raises(PlanError) as caught, assemble(plan, world):
        pass
    assert caught.value.diagnostics[0].code == "head-vocabulary"
    assert message in str(caught.value)


def steps(tables: dict[str, Any], folder: Any) -> str:
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        try:
            run.step()
        except RunError as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize(("change", "what"), [("times", "mul"), ("tanh", "tanh"), ("item", "mean")])
def test_logits_that_are_not_returned_as_they_are(ranks, own, sharded, change, what):
    """Found in the first forward, on all ranks alike, before anything is sent."""
    model = {"factory": "scored:scaled", "options": {"change": change}}
    for said in ranks(2)(steps, sharded(2, weights=SHARED, model=model, **OWN_DATA), own):
        assert said.startswith("error[logits-split]")
        assert f"`{what}` of logits of which no rank has all" in said


def first_steps(plans: list[dict[str, Any]], folder: Any) -> list[str]:
    return [steps(tables, folder) for tables in plans]


def test_a_class_that_there_is_not_is_the_same_error_in_every_layout(ranks, own, sharded):
    """Whole, gathered or shared: the field and the value, before anything is sent."""
    changes = {"data": {"factory": "scored:Beyond"}, "model": {"factory": "scored:layers"}}
    alone = steps(sharded(1, 1, **changes), own)
    assert "label-out-of-range" in alone
    assert "the field `labels` has the class 5, but the model's logits have 4: 0 to 3" in alone
    plans = [sharded(2, weights={"head": head}, **changes) for head in ("gather", "vocabulary")]
    for said in ranks(2)(first_steps, plans, own):
        assert said == [alone, alone]

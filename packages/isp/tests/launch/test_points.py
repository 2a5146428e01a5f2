"""Gathers ahead start where the plan says, at any module of a layer; where it says so in vain, it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import PlanError
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict

CALLED = ("attention", "attention.query", "attention.output", "feed_forward", "feed_forward.gate", "feed_forward.down")


def order(tables: dict[str, Any], folder: Any) -> list[str]:
    """What is called in the first block, and where among it the next block's gather starts; once the order is known."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        communicator = run.stepper.executor.weights
        events: list[str] = []
        gather = communicator._gather

        def spy(unit: Any) -> Any:
            events.append(f"gather {unit.name}")
            return gather(unit)

        run.step()
        communicator._gather = spy
        block = next(layer.module for layer in run.layers if layer.name == "blocks.0")
        for name in CALLED:
            block.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: events.append(name))
        run.step()
        launched = len(communicator.launches.hooks)
        events.append(f"{launched} hooks")
        return events


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("launch", "before", "after", "hooks"),
    [
        ("attention", "attention.query", None, 3),
        ("feed_forward", "feed_forward.gate", "attention.output", 3),
        ("attention.output", "feed_forward", "attention.query", 0),
        ("*", "attention.output", "attention.query", 0),
        ("feed_forward*", "feed_forward", "attention.output", 6),
    ],
)
def test_gathers_start_at_the_launch_point(ranks, sharded, texts, launch, before, after, hooks):
    """The next block's, in the first forward; module or not, sharded or not."""
    changes = {"evaluation": {"every": 9, "steps": 1}, "run__steps": 9, "model__num_layers": 3}
    tables = sharded(2, weights={"launch": launch}, **changes)
    for events in ranks(2)(order, tables, texts):
        at = events.index("gather blocks.1")
        assert at < events.index(before)
        assert after is None or events.index(after) < at
        assert events[-1] == f"{hooks} hooks"


def test_a_name_that_is_not_there(sharded, texts):
    """Found on meta: what `check --model` says."""
    plan = plan_from_dict(sharded(2, weights={"launch": "atention.outputt"}), texts)
    with World.fake(0, 2) as world, pytest.raises(PlanError) as caught, assemble(plan, world):
        pass
    (problem,) = caught.value.diagnostics
    assert problem.code == "launch-point"
    assert "`atention.outputt` matches no module of any layer; within layers there are " in problem.message
    assert "`attention.query`, " in problem.message
    assert problem.hint == "did you mean `attention.output`?"


def test_a_point_where_every_module_is_one(sharded, texts):
    """Found by `check`, without torch."""
    tables = sharded(2, weights={"launch": "attention", "unit": "module"})
    (problem,) = check_plan(plan_from_dict(tables, texts), 2)
    assert problem.code == "launch-unit"
    assert problem.path == ("weights", "launch")
    assert check_plan(plan_from_dict(sharded(2, weights={"unit": "module"}), texts), 2) == []

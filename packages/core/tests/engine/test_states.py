"""What a checkpoint and `run.memory` see of an optimizer's states is the same, by name."""

from __future__ import annotations

import torch

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.engine.update import MASTER, states_of
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import small_plan


def test_nested_states_have_the_way_to_them_in_their_names(texts):
    """As of optimizers that keep factors of a matrix in a list; words and numbers among them are no tensors."""
    plan = plan_from_dict(small_plan(precision__compute="bf16"), texts)
    with World.join("cpu") as world, assemble(plan, world) as run:
        run.step()
        update = run.stepper.update
        stepped = update.masters.stepped[0]
        left, right = torch.ones(3), torch.ones(4)
        update.optimizer.state[stepped.parameter]["factors"] = {"both": [left, (right, "unused")]}
        update.optimizer.state["all"] = {"count": torch.ones(2)}
        of_first = {one.state: one.tensor for one in states_of(update) if one.name == stepped.name}
        assert list(of_first) == [MASTER, "step", "exp_avg", "exp_avg_sq", "factors.both.0", "factors.both.1.0"]
        assert of_first["factors.both.0"] is left
        assert of_first["factors.both.1.0"] is right
        seen = {f"{one.name}.{one.state}" for one in states_of(update) if one.state != MASTER}
        assert {name for name, _ in run.memory.holdings.everything("optimizer_states")} == {*seen, "optimizer.count"}

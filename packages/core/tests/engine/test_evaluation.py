"""An evaluation measures what it says and changes nothing."""

from __future__ import annotations

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import UsageError
from sley_core.plan.load import plan_from_dict
from sley_testing.parity import assert_same_bits
from sley_testing.runs import weights

EVERY_2 = {"every": 2, "steps": 3}


def test_it_is_the_mean_over_the_first_held_out_samples(alone, small):
    """The sum over all labels that count by their number: twice the same, and that of one large micro-batch."""
    found = []
    for micro_size in (1, 4):
        with alone(small(evaluation=EVERY_2, batch__micro_size=micro_size)) as run:
            found += [run.evaluate(), run.evaluate()]
            assert run.held_out.state() == {"samples": 12}
    assert found == pytest.approx([found[0]] * 4, rel=1e-12)
    with alone(small(evaluation=EVERY_2)) as run:
        loss = weight = 0.0
        run.held_out.restore({"samples": 0})
        for _ in range(3):
            batch = run.held_out.next()
            hidden = batch["tokens"]
            for layer in run.layers:
                hidden = layer.module(hidden)
            kept = batch["labels"] != -100
            loss += torch.nn.functional.cross_entropy(hidden[kept], batch["labels"][kept], reduction="sum").item()
            weight += kept.sum().item()
    assert found[0] == pytest.approx(loss / weight, rel=1e-12)


def test_held_out_losses_stand_in_the_rows_of_their_steps(alone, small):
    rows = []
    with alone(small(evaluation=EVERY_2, run__steps=5)) as run:
        run.listeners.append(rows.append)
        run.train()
        assert rows[-1]["held_out_loss"] == run.evaluate()
    assert [row["step"] for row in rows if "held_out_loss" in row] == [2, 4, 5], "and after the last step"


def test_nothing_is_changed_nor_kept(alone, small):
    with alone(small(evaluation=EVERY_2, model__options={"dropout": 0.5})) as run:
        run.step()
        held = run.layers[1].module.dropout.eval()
        gradients = {param.name: run.store.gradient(param).clone() for param in run.store.params}
        before = weights(run)
        run.evaluate()
        assert_same_bits(before, weights(run))
        assert_same_bits(gradients, {param.name: run.store.gradient(param) for param in run.store.params})
        parts = [part for layer in run.layers for part in layer.module.modules()]
        assert [part for part in parts if not part.training] == [held], "a part that is held in evaluation mode stays so"


def evaluate(tables, folder):
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        return run.evaluate()


def test_a_plan_without_evaluation_says_so(alone, small):
    with alone(small()) as run, pytest.raises(UsageError, match=r"no \[evaluation\] table"):
        run.evaluate()

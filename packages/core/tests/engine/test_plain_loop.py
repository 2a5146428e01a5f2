"""The engine against the loop that everybody writes by hand: same model, same batches, torch's own optimizer and clipping."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.config import CrossEntropyConfig
from sley_core.losses.cross_entropy import CrossEntropy
from sley_core.plan.load import plan_from_dict
from sley_testing.plain import PlainLoop, assert_step, decay_groups
from sley_testing.runs import gradients, weights

PLAN = {
    "run": {"name": "plain", "steps": 4, "device": "cpu"},
    "model": {"use": "models.llama", "num_layers": 2, "hidden": 16, "heads": 2, "tie_embeddings": True},
    "data": {"use": "data.text", "source": "python-stdlib", "sequence": 16, "documents": "cut"},
    "batch": {"global_size": 6, "micro_size": 2},
    "optimizer": {"use": "core.adamw", "lr": 1e-2, "weight_decay": 0.1, "clip_norm": 0.5},
    "learning_rate": {"use": "core.linear", "warmup_steps": 2},
    "precision": {"compute": "fp64"},
}


def test_three_micro_batches_of_the_engine_are_one_batch_by_hand():
    with assemble(plan_from_dict(PLAN), World.alone("cpu")) as run, assemble(plan_from_dict(PLAN), World.alone("cpu")) as own:
        own.store.close()  # the loop by hand has no hooks
        loop = PlainLoop(
            [(layer.name, layer.module) for layer in own.layers],
            CrossEntropy(CrossEntropyConfig()),
            optimizer=lambda named: torch.optim.AdamW(decay_groups(named, 0.1), lr=1e-2, betas=(0.9, 0.95)),
            clip_norm=0.5,
        )
        for number in range(4):
            for group in loop.optimizer.param_groups:
                group["lr"] = 1e-2 * min((number + 1) / 2, 1.0 - 0.45 * (number - 1))
            step = loop.step([own.feed.next()])
            row = run.step()
            assert row["lr"] == pytest.approx(loop.optimizer.param_groups[0]["lr"], rel=1e-12)
            assert_step(step, row, gradients(run), weights(run))


def test_a_difference_is_told_by_name():
    loop = PlainLoop(
        [nn.Linear(1, 1)], CrossEntropy(CrossEntropyConfig()), optimizer=lambda named: torch.optim.SGD([named[0][1]])
    )
    step = loop.step([{"input": torch.ones(1, 1), "labels": torch.zeros(1, dtype=torch.int64)}])
    row = {"loss": step.loss, "grad_norm": step.grad_norm}
    assert_step(step, row, step.gradients, step.weights)
    with pytest.raises(AssertionError, match="grad_norm is"):
        assert_step(step, row | {"grad_norm": step.grad_norm + 1e-8}, {}, {})
    for wrong in ({"0.weight": step.gradients["0.weight"] + 1e-6}, {}), ({}, {"0.weight": step.weights["0.weight"] + 1e-6}):
        with pytest.raises(AssertionError, match=r"0\.weight"):
            assert_step(step, row, *wrong)

"""A step without numbers, or without anything that counts, changes nothing: whoever catches its error can go on."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import RunError
from sley_core.optim.shared import skips_on_device, step_if
from sley_core.plan.load import plan_from_dict
from sley_testing.parity import assert_same_bits
from sley_testing.runs import weights


def go_on(tables, folder):
    """Five steps, of which the one that fails is told and passed over: what was told, the rows, the weights."""
    told, rows = [], []
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        for _ in range(5):
            before = weights(run)
            try:
                rows.append(run.step())
            except RunError as error:
                told.append(str(error.diagnostics[0]))
                assert_same_bits(before, weights(run))
        return told, rows, weights(run)


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_after_a_loss_that_is_no_number_a_program_can_go_on(own, small, ranks, compute):
    """Steps of four samples: the one that starts with the token 7 is the last of the second, and belongs to rank 1."""
    tables = small(
        model={"factory": "own_models:poisoned", "options": {"token": 7}},
        data__shuffle=False,
        precision={"compute": compute},
        optimizer={"use": "core.adamw", "lr": 0.01, "clip_norm": 1.0},
    )
    layouts = [go_on(tables, own), *ranks(2)(go_on, tables, own)]
    for told, rows, after in layouts:
        (message,) = told
        assert message.startswith("error[not-finite]: step 2: loss nan, gradient norm nan")
        assert [row["step"] for row in rows] == [1, 3, 4, 5], "a step that was not taken keeps its number"
        assert all(torch.isfinite(value).all() for value in after.values())
    assert "first in the gradient of 'head.bias'; samples 4, 5, 6, 7\n" in layouts[0][0][0]
    assert "; the loss of rank 1 is NaN; first in the gradient of 'head.bias'; samples 6, 7\n" in layouts[1][0][0]
    assert layouts[1][0] == layouts[2][0], "all ranks say the same"
    assert_same_bits(layouts[1][2], layouts[2][2])


class Late:
    """A device whose steps are read one step later, as CUDA's are."""

    is_async = True

    def __init__(self, device):
        self.device = device

    def __getattr__(self, name):
        return getattr(self.device, name)


def test_a_step_under_way_when_the_one_before_is_refused_is_told_by_the_next_call(own, small, monkeypatch):
    """As on a device that is not asynchronous: the same rows, learning rates and weights."""
    tables = small(
        model={"factory": "own_models:poisoned", "options": {"token": 7}},
        data__shuffle=False,
        run__steps=5,
        learning_rate={"warmup_steps": 4},
    )
    _, wanted, after = go_on(tables, own)
    told = []
    with World.join("cpu") as world, assemble(plan_from_dict(tables, own), world) as run:
        monkeypatch.setattr(run.world, "device", Late(world.device))
        run.listeners.append(told.append)
        with pytest.raises(RunError, match=r"not-finite.*step 2: loss nan"):
            run.train()
        assert [row["step"] for row in told] == [1]
        assert run.train() == "finished"
        assert [(row["step"], row["lr"], row["loss"]) for row in told] == [
            (row["step"], row["lr"], row["loss"]) for row in wanted
        ]
        assert_same_bits(after, weights(run))


def test_a_listener_may_not_evaluate_weights_of_the_step_after(alone, small, monkeypatch):
    """On CUDA these are there already; on the CPU they are those of the row."""
    tables = small(evaluation={"every": 9, "steps": 1}, run__steps=3)
    with alone(tables) as run:
        run.listeners.append(lambda row: run.evaluate())
        assert run.train() == "finished"
    with alone(tables) as run:
        monkeypatch.setattr(run, "device", Late(run.device))
        run.listeners.append(lambda row: run.evaluate())
        with pytest.raises(RunError, match="step-running"):
            run.train()


def test_a_batch_of_which_nothing_counts_is_no_loss_of_zero(alone, small):
    """torch's own mean is NaN there; here nothing is changed, and the next step is taken as if it had not been."""
    import own_data

    with alone(small(evaluation={"every": 9, "steps": 1})) as run:
        before = weights(run)
        batch = own_data.batch(0, 4)
        batch["labels"][:] = -100
        with pytest.raises(RunError, match=r"error\[nothing-counts\]: step 1: the loss weight of the batch is 0"):
            run.step(batch)
        assert_same_bits(before, weights(run))
        assert run.step(own_data.batch(0, 4))["step"] == 2
        run.stepper.executor.loss.weight = lambda batch: 0.0
        with pytest.raises(RunError, match=r"nothing-counts\]: the evaluated samples have a loss weight of 0"):
            run.evaluate()


def test_a_held_out_loss_that_is_no_number_is_noticed(own, small):
    """The training samples lack the token that the held-out ones have."""
    tables = small(
        model={"factory": "own_models:poisoned", "options": {"token": 1}},
        data={"factory": "own_data:Rows", "options": {"num_samples": 1}},
        evaluation={"every": 1, "steps": 1},
    )
    rows = []
    with World.join("cpu") as world, assemble(plan_from_dict(tables, own), world) as run:
        run.outputs = replace(run.outputs, writers=[SimpleNamespace(write=rows.append, close=lambda: None)])
        with pytest.raises(RunError, match=r"not-finite\]: the loss of the evaluated samples is nan"):
            run.step()
    assert [row["step"] for row in rows] == [1], "the step was taken, and is told"


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_step_that_the_device_leaves_out_leaves_nothing(kind):
    """What CUDA does without asking the host; a CPU's fused kernels know the flag too."""
    torch.manual_seed(0)
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}

    def trained(skip_at):
        weight = torch.nn.Parameter(torch.ones(5))
        optimizer = kind([weight], lr=0.1, fused=True, **options)
        assert skips_on_device(optimizer)
        for step in range(4):
            is_bad = step == skip_at
            weight.grad = torch.full((5,), float("nan") if is_bad else 1.0 + step)
            if not (skip_at is None and step == 2):
                step_if(optimizer, torch.tensor(not is_bad))
        return weight.detach(), optimizer.state_dict()["state"]

    (skipped, states), (absent, wanted) = trained(2), trained(None)
    assert torch.equal(skipped, absent)
    for name, value in states[0].items():
        torch.testing.assert_close(value, wanted[0][name], rtol=0, atol=0)
    assert not skips_on_device(kind([torch.nn.Parameter(torch.ones(1))], lr=0.1))

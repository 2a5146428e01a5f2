"""What people write around a linear: with its weight gradient handed over, the same numbers as in a loop by hand."""

from __future__ import annotations

import copy
import io
from functools import partial

import pytest
import torch
from torch import nn

from sley_testing.habits import HABITS
from sley_testing.habits import layers as layers_of
from sley_testing.runs import assert_by_hand, record, same_on_all


def tables(small, habit, accumulation="direct", **changes):
    return small(
        model={"factory": "sley_testing.habits:model", "options": {"habit": habit}},
        precision={"compute": "fp64", "accumulation": accumulation},
        **changes,
    )


def recorded_all(every, num_steps, folder, batches):
    """Several plans in the same ranks: starting these takes longer than a small run."""
    return [record(one, num_steps, folder=folder, batches=batches) for one in every]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # forward-mode derivatives
@pytest.mark.parametrize("habit", [*HABITS, "Assigned"])
def test_a_habit_gives_the_numbers_of_a_loop_by_hand(own, small, habit):
    import own_data

    batches = [own_data.batch(4 * step, 4) for step in range(4)]
    found = record(tables(small, habit), 4, folder=own, batches=batches)
    layers = layers_of(own_data.Rows.info, habit)
    assert_by_hand(found, layers, batches, partial(torch.optim.SGD, lr=0.1), micro_size=1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_habits_on_two_ranks_that_differ_in_them(ranks, own, small, recompute):
    """How often a linear is used depends on the samples, which are others on each rank; every gradient is reduced once."""
    import own_data

    batches = [own_data.batch(7 * step, 4) for step in range(4)]
    policy = {"use": "core.recompute", "fraction": 1.0} if recompute else {"use": "core.keep"}
    habits = ["Adaptive", "AdaptiveAgain", "InPlace", "GradientWithin", "Frozen"]
    every = [
        tables(small, habit, accumulation, activations=policy)
        for habit in habits
        for accumulation in ("direct", "autograd")
        if not (recompute and habit in ("AdaptiveAgain", "GradientWithin"))
    ]
    by_rank = ranks(2)(recorded_all, every, 4, own, batches)
    for one, layouts in zip(every, zip(*by_rank, strict=True), strict=True):
        same_on_all(layouts)
        layers = layers_of(own_data.Rows.info, one["model"]["options"]["habit"])
        assert_by_hand(layouts[0], layers, batches, partial(torch.optim.SGD, lr=0.1), micro_size=1)


def test_a_copy_of_a_layer_is_an_ordinary_module(small, alone):
    """By deepcopy and by torch.save, while the run is open; a copy trains nobody but itself, and is copied again."""
    with alone(small(precision={"compute": "fp64", "accumulation": "direct"})) as run:
        run.step()
        layer = run.layers[1].module
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        x = torch.randn(2, 3, 8, dtype=torch.float64)
        wanted = layer(x)
        for made in (copy.deepcopy(layer), copy.deepcopy(copy.deepcopy(layer)), loaded):
            assert type(made.inner) is nn.Linear
            assert torch.equal(made(x), wanted)
            made(x).sum().backward()
            assert made.inner.weight.grad is not None
            with torch.no_grad():
                made.inner.weight.zero_()
            assert not torch.equal(made(x), wanted), "a copy has weights of its own"
        assert torch.equal(layer(x), wanted)


def saved_bytes(layer, x):
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.nbytes) or t, lambda t: t):
        layer(x)
    return sum(sizes)


def test_frozen_linears_keep_no_inputs_until_they_are_unfrozen(small, alone):
    x = torch.randn(64, 12, 8, dtype=torch.float64)
    used = {}
    for accumulation in ("autograd", "direct"):
        with alone(tables(small, "Frozen", accumulation)) as run:
            block = run.layers[1].module
            x.requires_grad_()
            used[accumulation] = saved_bytes(block, x)
            run.step()
            before = block.one.weight.detach().clone()
            block.one.requires_grad_(True)
            run.step()
            assert not torch.equal(block.one.weight, before)
            used[accumulation, "unfrozen"] = block.one.weight.detach().clone()
    assert used["direct"] <= used["autograd"]
    torch.testing.assert_close(used["direct", "unfrozen"], used["autograd", "unfrozen"])

"""What people write around a linear, and hooks on gradients: the numbers of a loop by hand, or refused by name."""

import copy
import io
from functools import partial

import pytest
import torch
from torch import nn

from sley_core.engine.shards import Shard, check_hooks
from sley_core.errors import PlanError
from sley_core.model.layers import Model
from sley_testing.habits import FULL_GRADIENT_HABITS, HABITS
from sley_testing.habits import layers as layers_of
from sley_testing.runs import assert_equal_replicas, assert_matches_plain_loop, record


def tables(small, habit, accumulation="direct", **changes):
    return small(
        model={"factory": "sley_testing.habits:model", "options": {"habit": habit}},
        precision={"compute": "fp64", "accumulation": accumulation},
        **changes,
    )


def assert_numbers_by_hand(plan, layers, name, own):
    import own_data

    batches = [own_data.batch(4 * step, 4) for step in range(2)]
    found = record(plan, 2, folder=own, batches=batches)
    assert_matches_plain_loop(found, layers(own_data.Rows.info, name), batches, partial(torch.optim.SGD, lr=0.1), micro_size=1)


def recorded_all(every, num_steps, folder, batches):
    """Several plans in the same ranks: starting these takes longer than a small run."""
    return [record(one, num_steps, folder=folder, batches=batches) for one in every]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # forward-mode derivatives
@pytest.mark.parametrize("habit", [*HABITS, *FULL_GRADIENT_HABITS])
def test_a_habit_gives_the_numbers_of_a_loop_by_hand(own, small, habit):
    assert_numbers_by_hand(tables(small, habit), layers_of, habit, own)


@pytest.mark.sample(1)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_habits_on_two_ranks_that_differ_in_them(ranks, own, small, recompute):
    """How often a linear is used depends on the samples, which are others on each rank; every gradient is reduced once."""
    import own_data

    batches = [own_data.batch(7 * step, 4) for step in range(2)]
    policy = {"use": "core.recompute", "fraction": 1.0} if recompute else {"use": "core.keep"}
    habits = ["Adaptive", "AdaptiveAgain", "InPlace", "GradientInForward", "Frozen", "HookedWeights"]
    repeating = habits[:2]
    every = [
        tables(small, habit, accumulation, activations=policy)
        for habit in habits
        for accumulation in (("direct", "autograd") if habit in repeating else ("direct",))
        if not (recompute and habit in ("AdaptiveAgain", "GradientInForward"))
    ]
    by_rank = ranks(2)(recorded_all, every, 2, own, batches)
    for one, layouts in zip(every, zip(*by_rank, strict=True), strict=True):
        assert_equal_replicas(layouts)
        layers = layers_of(own_data.Rows.info, one["model"]["options"]["habit"])
        assert_matches_plain_loop(layouts[0], layers, batches, partial(torch.optim.SGD, lr=0.1), micro_size=1)


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


def test_frozen_linears_keep_no_inputs_until_they_are_unfrozen(small, alone):
    x = torch.randn(64, 12, 8, dtype=torch.float64)
    used = {}
    for accumulation in ("autograd", "direct"):
        with alone(tables(small, "Frozen", accumulation)) as run:
            block = run.layers[1].module
            x.requires_grad_()
            sizes = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.nbytes) or t, lambda t: t):
                block(x)
            used[accumulation] = sum(sizes)
            run.step()
            before = block.one.weight.detach().clone()
            block.one.requires_grad_(True)
            run.step()
            assert not torch.equal(block.one.weight, before)
            used[accumulation, "unfrozen"] = block.one.weight.detach().clone()
    assert used["direct"] <= used["autograd"]
    torch.testing.assert_close(used["direct", "unfrozen"], used["autograd", "unfrozen"])


def hooked(small, kind, accumulation="direct"):
    return small(
        model={"factory": "own_models:hooked", "options": {"kind": kind}},
        precision={"compute": "fp64", "accumulation": accumulation},
    )


@pytest.mark.parametrize("accumulation", ["direct", "autograd"])
@pytest.mark.parametrize("kind", ["Before", "OfModules"])
def test_hooks_give_the_numbers_of_a_loop_by_hand(own, small, kind, accumulation):
    from own_models import model as layers

    assert_numbers_by_hand(hooked(small, kind, accumulation), layers, kind, own)


def test_a_hook_that_is_set_while_a_run_is_open_is_called(small, alone):
    with alone(small(precision={"compute": "fp64", "accumulation": "direct"})) as run:
        param = run.registry["blocks.0.inner.weight"]
        param.parameter.register_hook(lambda gradient: gradient * 0)
        run.step()
        assert not run.store.gradient(param).any()
        assert run.store.gradient(run.registry["blocks.1.inner.weight"]).any()


def test_a_hook_on_a_sum_that_a_run_makes_itself_is_refused_by_name(small, alone):
    with (
        pytest.raises(PlanError, match=r"'blocks.0.one.weight' has a hook on its accumulated gradient") as raised,
        alone(hooked(small, "Accumulated")),
    ):
        pass
    assert raised.value.diagnostics[0].code == "model-hook"


def test_a_hook_on_a_gradient_that_no_rank_makes_whole_is_refused_by_name():
    one, two, plain = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    two.weight = one.weight
    one.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    model = Model([("one", one), ("two", two), ("plain", plain)])
    tied = [(0, model.layers[:1]), (1, model.layers[1:])]
    for stages, shards, num_slices, says in (
        (tied, {}, 1, "several pipeline stages"),
        ([(0, model.layers)], {id(one.weight): Shard((4, 4), 2, 0)}, 1, "a shard"),
        ([(0, model.layers)], {}, 2, "a slice of the sequence"),
    ):
        with pytest.raises(PlanError, match=rf"'one.weight' has a gradient hook, .*{says}") as raised:
            check_hooks(stages, shards, num_slices)
        assert [one.code for one in raised.value.diagnostics] == ["model-hook"]
    check_hooks([(0, model.layers)], {id(plain.weight): Shard((4, 4), 2, 0)}, 1)
    one.weight.requires_grad_(False)
    check_hooks(tied, {}, 2)

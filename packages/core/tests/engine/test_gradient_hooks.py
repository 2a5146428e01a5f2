"""Hooks that a model sets on its parameters' gradients: as in a loop by hand, or refused by name."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from sley_core.engine.refusals import check_hooks
from sley_core.engine.shards import Shard
from sley_core.errors import PlanError
from sley_core.model.layers import Model
from sley_testing.runs import assert_by_hand, record, same_on_all


def tables(small, kind, accumulation="direct", **changes):
    return small(
        model={"factory": "own_hooked:model", "options": {"kind": kind}},
        precision={"compute": "fp64", "accumulation": accumulation},
        **changes,
    )


@pytest.mark.parametrize("accumulation", ["direct", "autograd"])
@pytest.mark.parametrize("kind", ["HookedWeights", "Before", "OfModules"])
def test_hooks_give_the_numbers_of_a_loop_by_hand(own, small, kind, accumulation):
    import own_data
    import own_hooked

    batches = [own_data.batch(4 * step, 4) for step in range(3)]
    found = record(tables(small, kind, accumulation), 3, folder=own, batches=batches)
    layers = own_hooked.layers(own_data.Rows.info, kind)
    assert_by_hand(found, layers, batches, partial(torch.optim.SGD, lr=0.1), micro_size=1)


def test_hooks_on_two_ranks_that_recompute(ranks, own, small):
    import own_data
    import own_hooked

    batches = [own_data.batch(4 * step, 4) for step in range(3)]
    changed = tables(small, "HookedWeights", activations={"use": "core.recompute", "fraction": 1.0})
    layouts = ranks(2)(record, changed, 3, folder=own, batches=batches)
    same_on_all(layouts)
    layers = own_hooked.layers(own_data.Rows.info, "HookedWeights")
    assert_by_hand(layouts[0], layers, batches, partial(torch.optim.SGD, lr=0.1), micro_size=1)


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
        alone(tables(small, "Accumulated")),
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
        (tied, {}, 1, "parts of a pipeline"),
        ([(0, model.layers)], {id(one.weight): Shard((4, 4), 2, 0)}, 1, "a shard"),
        ([(0, model.layers)], {}, 2, "a slice of a sequence"),
    ):
        with pytest.raises(PlanError, match=rf"'one.weight' has a gradient hook, .*{says}") as raised:
            check_hooks(stages, shards, num_slices)
        assert [one.code for one in raised.value.diagnostics] == ["model-hook"]
    check_hooks([(0, model.layers)], {id(plain.weight): Shard((4, 4), 2, 0)}, 1)
    one.weight.requires_grad_(False)
    check_hooks(tied, {}, 2)

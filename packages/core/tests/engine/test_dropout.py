"""Randomness belongs to a layer of a micro-batch of a step: every layout draws the same, and nothing draws it twice."""

from __future__ import annotations

import itertools

import pytest
import torch

from sley_core.comm.world import World
from sley_core.engine.call import Keep, LayerCaller
from sley_core.engine.step_state import MicroStep, Phase
from sley_core.model.layers import Layer
from sley_testing.runs import assert_parity, record, same_on_all

DROPOUT = {"factory": "own_models:plain", "options": {"dropout": 0.5}}


@pytest.fixture
def tables(small):
    return lambda **changes: small(model=DROPOUT, batch__micro_size=2, **changes)


def test_two_ranks_draw_what_one_draws(ranks, own, tables):
    reference = record(tables(), 3, folder=own)
    layouts = ranks(2)(record, tables(), 3, folder=own)
    assert_parity(reference, layouts, "fp64")
    same_on_all(layouts)


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_recomputation_draws_it_again(own, tables, fraction):
    kept = record(tables(), 3, folder=own)
    again = record(tables(activations={"use": "core.recompute", "fraction": fraction}), 3, folder=own)
    same_on_all([kept, again])
    assert [row["loss"] for row in kept.rows] == [row["loss"] for row in again.rows]


def masks(run, num_steps):
    """By (step, layer, micro-batch) the mask that was drawn."""
    found = {}
    for step in range(num_steps):
        run.step()
        for layer in run.layers[1:-1]:
            found |= {(step, layer.name, micro): mask for micro, mask in enumerate(layer.module.masks)}
            layer.module.masks.clear()
    return found


def test_steps_micro_batches_and_layers_draw_different_masks(alone, small):
    with alone(small(model={"factory": "own_models:keeper"}, batch__global_size=2)) as run:
        found = masks(run, 2)
    assert len(found) == 2 * 2 * 2
    assert all(mask.unique().tolist() == [0.0, 2.0] for mask in found.values())
    for one, other in itertools.combinations(found.values(), 2):
        assert not torch.equal(one, other)


def test_slices_of_one_sample_draw_different_masks():
    """The first slice draws what the whole sequence would; another must not repeat its mask."""
    layer, micro = Layer("drop", torch.nn.Dropout(0.5)), MicroStep(0, 0, Phase.TRAIN, 0, 0)
    ones = torch.ones(256)
    callers = [LayerCaller(World.alone("cpu").device, 1, Keep(), slice_index=index) for index in (0, 0, 1, 2)]
    masks = [caller(layer, (ones,), {}, micro) for caller in callers]
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], LayerCaller(World.alone("cpu").device, 1, Keep())(layer, (ones,), {}, micro))
    for one, other in itertools.combinations(masks[1:], 2):
        assert 64 < int((one != other).sum()) < 192


def test_a_model_in_evaluation_mode_drops_as_one_in_training_mode(alone, own, tables, small):
    """As `from_pretrained` returns it; a program's own `eval()` holds, and an evaluation does not change it."""
    wanted = record(tables(), 2, folder=own)
    pretrained = small(model={"factory": "own_models:pretrained", "options": {"dropout": 0.5}}, batch__micro_size=2)
    found = record(pretrained, 2, folder=own)
    assert [row["loss"] for row in found.rows] == [row["loss"] for row in wanted.rows]
    without = record(small(batch__micro_size=2), 2, folder=own)
    with alone({**pretrained, "evaluation": {"every": 1, "steps": 1}}) as run:
        for layer in run.layers:
            layer.module.eval()
        assert [run.step()["loss"] for _ in range(2)] == [row["loss"] for row in without.rows]

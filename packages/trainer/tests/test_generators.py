"""Whatever a layer or a dataset draws from, it draws the same in every layout, again in recomputation, and after a resume."""

import itertools
import random
import threading

import numpy as np
import pytest
import torch

from sley_core.comm.world import World
from sley_core.engine.call import Keep, LayerCaller
from sley_core.engine.parts import MicroStep, Phase
from sley_core.errors import RunError, SleyError
from sley_core.generators import host_rng_state, seed_host
from sley_core.model.layers import Layer
from sley_testing.runs import assert_equal_replicas, assert_parity, record

KINDS = [["numpy", "RandomState", "closure", "torch"], ["random", "normal", "torch generator", "Random"]]
KINDS += [["Generator", "partial", "global", "of the class"], ["function of a module", "name in a module"]]
"""Those of `own_draws.DRAWS`, some at a time."""


def refusal(plan, folder):
    with pytest.raises(SleyError) as caught:
        record(plan, 1, folder=folder)
    return caught.value.diagnostics[0].code


@pytest.fixture
def tables(small):
    def tables(kind, **changes):
        return small(model={"factory": "own_draws:model", "options": {"kind": kind}}, batch__micro_size=2, **changes)

    return tables


def record_each(every, folder):
    return [record(tables, 2, folder=folder) for tables in every]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kinds", KINDS)
def test_a_layer_draws_the_same_in_each_layout(ranks, own, tables, kinds):
    by_rank = ranks(2)(record_each, [tables(kind) for kind in kinds], own)
    for kind, *layouts in zip(kinds, *by_rank, strict=True):
        reference = record(tables(kind), 2, folder=own)
        assert len({row["loss"] for row in reference.rows}) == 2, kind
        assert_parity(reference, layouts, "fp64")
        assert_equal_replicas(layouts)
        again = record(tables(kind, activations={"use": "core.recompute"}), 2, folder=own)
        assert_equal_replicas([reference, again])
        assert [row["loss"] for row in reference.rows] == [row["loss"] for row in again.rows], kind


@pytest.mark.parametrize(("factory", "words"), [("late", "creates a generator"), ("system", "SystemRandom")])
def test_a_generator_that_no_seed_reaches_is_refused(alone, small, factory, words):
    with alone(small(model={"factory": f"own_draws:{factory}"})) as run, pytest.raises(SleyError, match=words) as caught:
        run.step()
    assert caught.value.diagnostics[0].code == "model-random"
    assert "blocks.0" in str(caught.value)


def test_the_generators_of_one_seed_draw_different_numbers():
    before = host_rng_state()
    seed_host(2**61 + 12345)
    drawn = [torch.rand(50, dtype=torch.float64).numpy(), np.random.rand(50), np.array([random.random() for _ in range(50)])]
    torch.default_generator.set_state(before[0])
    for one, other in zip(drawn, [*drawn[1:], drawn[0]], strict=True):
        assert abs(one - other).min() > 1e-6


@pytest.mark.parametrize("label", ["step", "train", "evaluate"])
def test_a_programs_own_draws_go_on(alone, tables, label):
    with alone(tables("numpy", evaluation={"every": 2, "steps": 1})) as run:
        before = host_rng_state()
        wanted = np.random.rand(3), random.random()
        seed_state = host_rng_state()
        np.random.set_state(before[2])
        random.setstate(before[1])
        getattr(run, label)()
        assert (np.random.rand(3) == wanted[0]).all()
        assert random.random() == wanted[1]
        assert random.getstate() == seed_state[1]


@pytest.mark.parametrize("data", ["DrawingRows", "DrawingStream"])
def test_data_and_layers_may_draw_from_the_same_generators(ranks, own, tables, alone, data):
    plan = tables("numpy", data={"factory": f"own_draws:{data}"}, run__steps=4)
    reference = record(plan, 4, folder=own)
    assert_parity(reference, ranks(2)(record, plan, 4, folder=own), "fp64")
    assert reference.rows[0]["loss"] != record(tables("numpy"), 1, folder=own).rows[0]["loss"]
    with alone(plan) as run:
        batches = [run.feed.next() for _ in range(3)]
        run.feed.restore({"samples": 8})
        assert torch.equal(run.feed.next()["tokens"], batches[2]["tokens"])


def test_a_collate_that_draws_is_refused_where_a_rank_has_some_of_the_rows(ranks, own, small):
    plan = small(data={"factory": "own_draws:DrawingCollate"})
    rows = [record(plan, 2, folder=own).rows for _ in range(2)]
    assert [row["loss"] for row in rows[0]] == [row["loss"] for row in rows[1]]
    refused = ranks(2)(refusal, plan, own)
    assert set(refused) == {"data-random"}


def test_a_layer_does_not_wait_for_a_stuck_data_set_for_ever(alone, tables, monkeypatch):
    """Which reads no sample any more after the third batch."""
    import own_data

    goes_on, count, read = threading.Event(), itertools.count(), own_data.Rows.__getitem__

    def stuck(rows, index):
        if next(count) >= 12:
            goes_on.wait(20)
        return read(rows, index)

    monkeypatch.setattr(own_data.Rows, "__getitem__", stuck)
    drawing = {"factory": "own_draws:DrawingRows"}
    with alone(tables("numpy", data=drawing, run__steps=6, limits={"data_timeout_s": 0.3})) as run:
        with pytest.raises(RunError, match=r"data-timeout.*data ?set"):
            run.train()
        goes_on.set()


def test_steps_micro_batches_and_layers_draw_different_masks(alone, small):
    model, found = {"factory": "own_models:model", "options": {"kind": "Keeper", "num_blocks": 2}}, {}
    with alone(small(model=model, batch__global_size=2)) as run:
        for step in range(2):
            run.step()
            for layer in run.layers[1:-1]:
                found |= {(step, layer.name, micro): mask for micro, mask in enumerate(layer.module.masks)}
                layer.module.masks.clear()
    assert len(found) == 2 * 2 * 2
    assert all(mask.unique().tolist() == [0.0, 2.0] for mask in found.values())
    for one, other in itertools.combinations(found.values(), 2):
        assert not torch.equal(one, other)


def test_a_model_in_evaluation_mode_drops_as_one_in_training_mode(alone, own, small):
    """As `from_pretrained` returns it; a program's own `eval()` holds, and an evaluation does not change it."""
    wanted = record(small(model__options={"dropout": 0.5}, batch__micro_size=2), 2, folder=own)
    pretrained = small(model={"factory": "own_models:pretrained", "options": {"dropout": 0.5}}, batch__micro_size=2)
    found = record(pretrained, 2, folder=own)
    assert [row["loss"] for row in found.rows] == [row["loss"] for row in wanted.rows]
    without = record(small(batch__micro_size=2), 2, folder=own)
    with alone({**pretrained, "evaluation": {"every": 1, "steps": 1}}) as run:
        for layer in run.layers:
            layer.module.eval()
        assert [run.step()["loss"] for _ in range(2)] == [row["loss"] for row in without.rows]


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

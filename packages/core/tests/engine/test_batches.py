"""Batches: a program's own of any number of micro-batches, and the plan's, of which every sample is seen once an epoch."""

from __future__ import annotations

import importlib
from collections import Counter

import pytest

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_testing.collectives import collectives
from sley_testing.parity import assert_close_gradients
from sley_testing.runs import Recorded, assert_parity, record, same_on_all, weights

SIZES = (2, 8, 4)
"""Samples of each step's global batch; on two ranks with micro-batches of one that is 1, 4 and 2 micro-batches."""


def own_steps(tables, folder, sizes):
    """Steps on own batches of these sizes, this rank's share of each: rows, weights, and what was sent in each step."""
    recorded = Recorded()
    sent = []
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        recorded.first = weights(run)
        run.stepper.agreement.first = None  # the first step compares first values, beside what is counted here
        for step, size in enumerate(sizes):
            mine = size // world.size
            own = importlib.import_module("own_data").batch(10 * step + world.rank * mine, mine)
            with collectives() as calls:
                recorded.rows.append(run.step(own))
            sent.append([str(call) for call in calls])
            recorded.gradients.append({e.name: run.store.gradient(e).clone() for e in run.store.params})
        recorded.weights = weights(run)
    return recorded, sent


@pytest.mark.parametrize("recompute", [False, True])
def test_steps_of_1_4_and_2_micro_batches(ranks, own, small, recompute):
    tables = small(activations={"use": "core.recompute" if recompute else "core.keep"})
    reference, _ = own_steps(tables, own, SIZES)
    layouts, sent = zip(*ranks(2)(own_steps, tables, own, SIZES), strict=True)
    assert_parity(reference, layouts, "fp64")
    same_on_all(layouts)
    for wanted, found in zip(reference.gradients, layouts[0].gradients, strict=True):
        assert_close_gradients(wanted, found, 1e-10)
    assert [row["tokens"] for row in layouts[0].rows] == [12 * size for size in SIZES]
    assert sent[0] == sent[1]
    assert sent[0][0] == sent[0][1] == sent[0][2], "more micro-batches cost no more communication"


def test_micro_batches_that_come_apart_are_the_batch_that_they_make(own, small):
    """And where they are shorter than one another, that of which the rest is padding: no label counts there."""
    tables = small()
    batch = importlib.import_module("own_data").batch(0, 4)
    cut = [{name: value[at : at + 1] for name, value in batch.items()} for at in range(4)]
    whole, apart = (record(tables, 1, folder=own, batches=[one]) for one in (batch, cut))
    assert_parity(whole, [apart], "fp64")
    assert apart.rows[0]["tokens"] == whole.rows[0]["tokens"]
    lengths = (12, 3, 7, 5)
    padded = {name: value.clone() for name, value in batch.items()}
    for at, length in enumerate(lengths):
        padded["labels"][at, length:] = -100
    short = [{name: part[name][:, :length] for name in part} for part, length in zip(cut, lengths, strict=True)]
    full, ragged = (record(tables, 1, folder=own, batches=[one]) for one in (padded, short))
    assert_close_gradients(full.gradients[0], ragged.gradients[0], 1e-10)
    assert ragged.rows[0]["loss"] == pytest.approx(full.rows[0]["loss"], rel=1e-12)
    assert ragged.rows[0]["tokens"] == sum(lengths)


def samples_of(tables, folder, num_steps):
    """The dataset's index of every sample of this rank, step by step."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        seen = []
        run.listeners.append(lambda row: seen.append(run.feed.samples))
        for _ in range(num_steps):
            run.step()
        return seen


def test_every_sample_comes_once_an_epoch_and_none_is_dropped(ranks, own, small):
    """Five samples in batches of two: a batch spans two epochs, and each epoch has all five in an order of its own."""
    tables = small(data__options={"num_samples": 5}, batch={"global_size": 2, "micro_size": 1}, run__steps=10)
    alone = [index for step in samples_of(tables, own, 10) for index in step]
    epochs = [tuple(alone[at : at + 5]) for at in range(0, 20, 5)]
    assert all(Counter(epoch) == Counter(range(5)) for epoch in epochs)
    assert len(set(epochs)) > 1
    first, second = ranks(2)(samples_of, tables, own, 10)
    assert [index for pair in zip(first, second, strict=True) for step in pair for index in step] == alone

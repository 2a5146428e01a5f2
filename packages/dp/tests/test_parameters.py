"""Parameters that are unused, used twice, frozen or unfrozen are summed like all others."""

from __future__ import annotations

import pytest

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import PlanError, RunError
from sley_core.plan.load import plan_from_dict
from sley_testing.parity import assert_close_gradients
from sley_testing.runs import assert_parity, record, same_on_all

EVEN, ODD = (0, 2, 4, 6), (1, 3, 5, 7)
"""Samples without and with the flag."""


@pytest.mark.parametrize("handler", [{"use": "core.each"}, {"bucket_mb": 0.0005}, {"reduction": "bf16"}])
def test_what_some_ranks_or_none_use_counts_as_zero_there(ranks, small, own, batches, handler):
    """`never` is used on no rank; `flagged` on one rank, on the other, on both, on none; no rank waits."""
    tables = small(handler, model__factory="dp_parts:sometimes", batch__global_size=8, batch__micro_size=2)
    numbers = [EVEN + ODD, ODD + EVEN, ODD + ODD, EVEN + EVEN, EVEN + ODD]
    given = batches(*numbers)
    reference = record(tables, 5, folder=own, batches=given)
    found = ranks(2, timeout_s=30)(record, tables, 5, folder=own, batches=given)
    same_on_all(found)
    within = 2**-7 if "reduction" in handler else 1e-5
    for rank in found:
        for number, (wanted, got) in enumerate(zip(reference.gradients, rank.gradients, strict=True)):
            assert_close_gradients(wanted, got, within if number else min(within, 2**-8))
            assert not got["some.never.weight"].any()
            assert bool(got["some.flagged.weight"].any()) == any(sample % 2 for sample in numbers[number])


@pytest.mark.sample(2)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("num_micros", [1, 2])
def test_a_module_used_twice_under_recomputation(ranks, small, own, reentrant, num_micros):
    """Both uses count, in the first step and in those that overlap; torch's own checkpoint, either kind."""
    tables = small({"bucket_mb": 0.0005}, model__factory="dp_parts:twice", model__options={"reentrant": reentrant})
    tables |= {"precision": {"compute": "fp64"}, "batch": {"global_size": 2 * num_micros, "micro_size": 1}}
    found = ranks(2)(record, tables, 3, folder=own)
    assert_parity(record(tables, 3, folder=own), found, "fp64")
    same_on_all(found)


def set_trainable(run, prefix, trainable):
    for param in run.registry:
        if param.name.startswith(prefix):
            param.parameter.requires_grad_(trainable)


def steps_with_frozen(tables, folder):
    """Names and gradients of each step: all trainable, `layer1` frozen, unfrozen, all but a bias frozen, all again."""
    found = []
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        for changes in ({}, {"layer1": False}, {"layer1": True}, {"": False, "first.bias": True}, {"": True}, {}):
            for prefix, trainable in changes.items():
                set_trainable(run, prefix, trainable)
            run.step()
            found.append({param.name: run.store.gradient(param).clone() for param in run.store.params})
        weights = {param.name: param.parameter.detach().clone() for param in run.registry}
    return found, weights


@pytest.mark.parametrize("bucket_mb", [0.0005, 25.0])
def test_freezing_and_unfreezing_between_steps(ranks, small, own, bucket_mb):
    """What becomes trainable is reduced, what is frozen has no gradient and no place in a bucket."""
    tables = small({"bucket_mb": bucket_mb}, precision__compute="fp64")
    reference, weights = steps_with_frozen(tables, own)
    assert [len(gradients) for gradients in reference] == [8, 6, 8, 1, 8, 8]
    both = ranks(2)(steps_with_frozen, tables, own)
    for found, after in both:
        for wanted, got in zip(reference, found, strict=True):
            assert_close_gradients(wanted, got, 1e-10)
        assert_close_gradients(weights, after, 1e-10)


def step_all_frozen(tables, folder):
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        before = run.feed.state()
        set_trainable(run, "", False)
        with pytest.raises(RunError, match="depends on no parameter that is trained"):
            run.step()
        num_buckets = len(run.store.buffers)
        run.feed.restore(before)
        set_trainable(run, "", True)
        run.step()
        found = {param.name: run.store.gradient(param).clone() for param in run.store.params}
    return num_buckets, found


def test_with_everything_frozen_there_is_no_bucket(ranks, small, own):
    """A plan that freezes everything is refused; a program that does finds nothing to reduce or wait for."""
    tables = small(precision__compute="fp64")
    reference = record(tables, 1, folder=own)
    for num_buckets, found in ranks(2)(step_all_frozen, tables, own):
        assert num_buckets == 0
        assert_close_gradients(reference.gradients[0], found, 1e-10)
    tables["optimizer"]["groups"] = [{"match": "*", "freeze": True}]
    with pytest.raises(PlanError, match="all-frozen"):
        record(tables, 1, folder=own)


def test_a_step_whose_gradients_miss_one_rank_altogether(ranks, small, own, batches):
    """One rank's samples reach no parameter at all, so it has seen no order; it takes the other's and does not wait."""
    tables = small({"bucket_mb": 0.0005}, model__factory="dp_parts:only_flagged")
    tables |= {"batch": {"global_size": 4, "micro_size": 2}, "precision": {"compute": "fp64"}}
    given = batches((0, 2, 1, 3), (1, 3, 5, 7), (1, 3, 0, 2))
    reference = record(tables, 3, folder=own, batches=given)
    for rank in ranks(2, timeout_s=30)(record, tables, 3, folder=own, batches=given):
        for wanted, got in zip(reference.gradients, rank.gradients, strict=True):
            assert_close_gradients(wanted, got, 1e-10)

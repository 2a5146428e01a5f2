"""Every layout with a reducer of `dp` equals the one-process run of the same plan."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from sley_core.comm.backends import Direct
from sley_testing.collectives import can_read_peers
from sley_testing.parity import assert_close_gradients, assert_same_bits
from sley_testing.plans import small_plan
from sley_testing.runs import alone, assert_parity, record, same_on_all

LLAMA = small_plan(run=None, precision=None, loss={"use": "core.cross_entropy"}, batch__micro_size=1)
"""The tables of a model and its data, of unequal weight per sample, for the run of `small`."""

ONE_KIB, UNLIMITED = 1 / 1024, 1e9


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("size", "bucket_mb"),
    [
        (2, ONE_KIB),
        (1, 25.0),
        (2, 25.0),
        (2, UNLIMITED),
        (4, ONE_KIB),
        pytest.param(4, 25.0, marks=pytest.mark.campaign),
        pytest.param(4, UNLIMITED, marks=pytest.mark.campaign),
    ],
)
def test_buckets_of_any_size_keep_loss_and_gradients(ranks, small, texts, size, bucket_mb):
    """dp 1 (which has no buckets), 2 and 4 give one run, though samples weigh unequally; 8, 4 and 2 micro-batches per rank."""
    tables = small({"bucket_mb": bucket_mb}, **LLAMA)
    layouts = ranks(size)(record, tables, 3, folder=texts)
    assert_parity(alone(tables, 3, folder=texts), layouts, "fp32")
    same_on_all(layouts)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("accumulation", "attaches"), [("autograd", True), ("direct", False)])
def test_double_precision(ranks, small, texts, accumulation, attaches):
    """Parity to 1e-10, on ties and recomputation, whichever way gradients come into the buckets and are summed."""
    tables = small(**LLAMA, parallel__cross_memory_attach=attaches)
    tables["model"]["tie_embeddings"] = True
    tables |= {"activations": {"use": "core.recompute"}}
    tables |= {"precision": {"compute": "fp64", "accumulation": accumulation}}
    assert_parity(record(tables, 3, folder=texts), ranks(4)(record, tables, 3, folder=texts), "fp64")


def without_collectives(tables, folder):
    """Three steps in which no bucket may be summed by a collective."""

    def refuse(*args, what, contents):
        raise AssertionError(what)

    Direct.all_reduce = refuse
    return record(tables, 3, folder=folder)


@pytest.mark.skipif(not can_read_peers(), reason="memory of peers cannot be read here")
def test_memory_of_the_host_and_sockets_give_the_same_bits(ranks, small, texts):
    """On two ranks, where a sum has one order only."""
    tables = small(**LLAMA)
    sockets = ranks(2)(record, tables | {"parallel": {"cross_memory_attach": False}}, 3, folder=texts)
    memory = ranks(2)(without_collectives, tables, texts)
    assert_same_bits(sockets[0].weights, memory[0].weights)
    same_on_all(memory)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("num_micros", "size"), [(k, size) for k in (1, 2, 4) for size in (1, 2)])
def test_weights_after_eight_batches(ranks, small, own, num_micros, size):
    """1, 2 and 4 micro-batches on one rank and on two give one run."""
    tables = small(batch__global_size=8, batch__micro_size=8 // (num_micros * size))
    reference = alone(small(batch__global_size=8, batch__micro_size=8), 8, folder=own)
    for layout in ranks(size)(record, tables, 8, folder=own):
        assert_close_gradients(reference.weights, layout.weights, 1e-6)


@pytest.mark.parametrize("size", [4, pytest.param(2, marks=pytest.mark.campaign)])
def test_replicas_stay_equal_bit_for_bit(ranks, small, own, size):
    """Of twenty AdamW steps, whatever the order of a ring's sums."""
    tables = small(optimizer={"use": "core.adamw", "lr": 1e-2}, run__steps=20)
    same_on_all(ranks(size)(record, tables, 20, folder=own))


@pytest.mark.parametrize("kind", [1.0, 2.0, 3.0, "inf"])
def test_norm_and_clip(ranks, small, own, kind):
    """In the 1-, 2-, 3- and inf-norm, parameters without gradients count as zeros."""
    tables = small(
        model__factory="dp_parts:sometimes", optimizer__clip_norm=0.01, optimizer__clip_kind=kind, precision__compute="fp64"
    )
    assert_parity(record(tables, 3, folder=own), ranks(2)(record, tables, 3, folder=own), "fp64")


def around_the_update(run, seen):
    """Adds to `seen` what the reducer left, before norm, clip and optimizer have it."""
    update = run.stepper.update.step

    def step(*args):
        seen.append({param.name: run.store.gradient(param).clone() for param in run.store.params})
        return update(*args)

    run.stepper.update.step = step


def reduced_and_given(tables, folder):
    reduced = []
    given = record(tables, 3, folder=folder, prepare=partial(around_the_update, seen=reduced)).gradients
    return reduced, given


@pytest.mark.parametrize("clip_norm", [None, 0.01])
def test_without_clip_gradients_are_not_touched(ranks, small, own, clip_norm):
    """Without a clip they are the same bit for bit; with one they are not."""
    for reduced, given in ranks(2)(reduced_and_given, small(optimizer__clip_norm=clip_norm), own):
        assert len(reduced) == len(given) == 3
        for before, after in zip(reduced, given, strict=True):
            if clip_norm is None:
                assert_same_bits(before, after)
            else:
                assert any(not torch.equal(before[name], after[name]) for name in before)


def bits_after_the_backward(run, seen):
    weights = {param.name: param.parameter.detach().clone() for param in run.registry}

    def compare(chunk):
        seen.append(all(torch.equal(weights[param.name], param.parameter) for param in run.registry))

    run.store.on_chunk_done.append(compare)


def unchanged_in_the_first_step(tables, folder):
    seen = []
    record(tables, 1, folder=folder, prepare=partial(bits_after_the_backward, seen=seen))
    return seen


@pytest.mark.parametrize("handler", [{"use": "core.each"}, {"use": "dp.bucketed"}])
def test_a_reducer_leaves_weights_alone(ranks, small, own, handler):
    """Gradients are summed, not weights averaged, by `core.each`, the simple form, as by the others."""
    assert ranks(2)(unchanged_in_the_first_step, small(handler), own) == [[True], [True]]


class ZeroGrad:
    """Calls the optimizer's `zero_grad` before every step, as users' loops do."""

    def __init__(self, run, set_to_none):
        self.run = run
        self.set_to_none = set_to_none

    def before_forward(self, micro, inputs):
        if micro.micro == 0:
            self.run.stepper.update.optimizer.zero_grad(set_to_none=self.set_to_none)

    def ignore(self, *args):
        pass

    after_forward = before_loss = after_loss = before_backward = after_backward = ignore


def with_zero_grad(run, set_to_none):
    run.caller.hooks.append(ZeroGrad(run, set_to_none))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_in_any_form_changes_nothing(ranks, small, own, set_to_none):
    """Users' loops call it before every step; it is neither needed nor harmful, bit for bit."""
    prepare = partial(with_zero_grad, set_to_none=set_to_none)
    plain, called = (ranks(2)(record, small(), 3, folder=own, prepare=how) for how in (None, prepare))
    for one, other in zip(plain, called, strict=True):
        for before, after in zip(one.gradients, other.gradients, strict=True):
            assert_same_bits(before, after)
        assert_same_bits(one.weights, other.weights)

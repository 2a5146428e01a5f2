"""Which gradients lie in which bucket, and which collectives a step issues, when, and in which order."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

import sley_core.engine.buffers
from sley_core.assemble import assemble
from sley_core.comm.groups import Groups, make_groups
from sley_core.comm.world import World
from sley_core.engine.buffers import GradientBuffer, by_reduce_group
from sley_core.plan.load import plan_from_dict
from sley_core.sizes import ALIGNMENT_BYTES, split_by_size
from sley_core.topology import GroupEntry
from sley_testing.collectives import assert_same_sequence, collectives
from sley_testing.parity import assert_close_gradients
from sley_testing.runs import record, same_on_all

FOUR_BUCKETS = {"bucket_mb": 0.0005}
BEFORE_STEP = "all_reduce of 11 float64"
AFTER_STEP = "all_reduce of 6 float64"
"""What the engine itself sums at the start and at the end of a step: agreement; loss, norm and votes."""


@given(st.lists(st.integers(0, 50)), st.floats(0.5, 200))
def test_buckets_keep_order_and_cap_and_none_is_wasted(sizes, cap):
    buckets = split_by_size(list(enumerate(sizes)), lambda item: item[1], cap)
    assert [item for bucket in buckets for item in bucket] == list(enumerate(sizes))
    totals = [sum(size for _, size in bucket) for bucket in buckets]
    assert all(total <= cap or len(bucket) == 1 for total, bucket in zip(totals, buckets, strict=True))
    for total, (after, *_) in zip(totals, buckets[1:], strict=False):
        assert total + after[1] > cap, "the next item would have fitted"


def layouts(tables, folder, num_steps=3):
    """Returns names and bytes of each bucket, before the first step and after each."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        found = []
        for number in range(num_steps + 1):
            if number:
                run.step()
            found.append([([param.name for param in buffer.params], buffer.num_bytes) for buffer in run.store.buffers])
    return found


@pytest.mark.parametrize(("compute", "itemsize", "cap_bytes"), [("bf16", 4, 300), ("fp64", 8, 1536)])
def test_buckets_keep_their_cap_in_bytes(ranks, small, own, compute, itemsize, cap_bytes):
    """The cap counts bytes of accumulated gradients, alignment included; one parameter may exceed it."""
    tables = small({"bucket_mb": cap_bytes / 2**20}, precision__compute=compute)
    for buckets in ranks(2)(layouts, tables, own)[0]:
        assert len({name for names, _ in buckets for name in names}) == 8
        for names, num_bytes in buckets:
            assert num_bytes <= cap_bytes or len(names) == 1
            assert num_bytes >= sum(36 * itemsize if name.endswith("weight") else 6 * itemsize for name in names)
            assert num_bytes % ALIGNMENT_BYTES == 0


def test_the_first_bucket_holds_the_last_layer_and_the_order_is_learned_once(ranks, small, own):
    """Reverse order of use at first; then that of the first backward, where biases come before weights."""
    for found in ranks(2)(layouts, small(FOUR_BUCKETS), own, 4):
        names = [[params for params, _ in buckets] for buckets in found]
        assert names[0][0] == names[1][0] == ["layer2.bias", "layer2.weight"]
        assert names[2] == names[3] == names[4]
        assert all(name.startswith("first.") for name in names[2][-1])


def memory_of_buffers(tables, folder):
    """Returns the number of layouts and of storages in four steps, the last with a frozen parameter; and the most bytes."""
    storages = []
    most = 0

    class Counted(GradientBuffer):
        def __init__(self, *args):
            nonlocal most
            super().__init__(*args)
            storage = self.data.untyped_storage()
            storages.append((StorageWeakRef(storage), storage.nbytes()))
            most = max(most, sum({ref.cdata: size for ref, size in storages if not ref.expired()}.values()))

    sley_core.engine.buffers.GradientBuffer = Counted
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        for step in range(4):
            if step == 3:
                run.registry.trainable[0].parameter.requires_grad_(False)
            run.step()
        return run.store.num_layouts, len({ref.cdata for ref, _ in storages}), most


def test_a_layout_takes_over_the_memory_of_the_one_before(ranks, small, own):
    """Two never exist at once: buckets in another order reuse the memory; after a freeze they are new."""
    tables = small(precision__compute="bf16")
    one_layout = sum(num_bytes for _, num_bytes in ranks(2)(layouts, tables, own, 1)[0][0])
    assert ranks(2)(memory_of_buffers, tables, own) == [(4, 2, one_layout)] * 2


def orders(tables, folder):
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        (handler,) = run.stepper.handlers
        assert handler.kept() == {}, "no order is known before a step"
        run.step()
        run.step()
        return [param.name for param in run.store.seen_order], [param.name for param in run.store.params]


def test_ranks_that_see_other_orders_agree(ranks, small, own):
    """Two branches whose backwards come in opposite orders on the two ranks: both take the order of the first.

    Branches are of one size, so that with the order of each rank's own they would be summed crosswise without an error.
    """
    tables = small({"bucket_mb": 0.0001}, model__factory="dp_parts:branches", precision__compute="fp64")
    (seen, first), (seen_by_other, second) = ranks(2)(orders, tables, own)
    assert first == second == seen
    assert seen_by_other != seen, "or else nothing would be shown"
    reference, found = record(tables, 3, folder=own), ranks(2)(record, tables, 3, folder=own)
    for rank in found:
        assert_close_gradients(reference.gradients[2], rank.gradients[2], 1e-10)
    same_on_all(found)


class Marks:
    """Notes how many collectives had been issued when each backward ended."""

    def __init__(self):
        self.calls = []
        self.marks = []

    def after_backward(self, micro, input_gradient):
        self.marks.append(len(self.calls))

    def ignore(self, *args):
        pass

    before_forward = after_forward = before_loss = after_loss = before_backward = ignore


def steps(tables, folder, num_steps, prepare=None):
    """Returns for each step the collectives, how many had been issued after each backward, and the buckets' groups and
    sizes.
    """
    found = []
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        if prepare is not None:
            prepare(run)
        hook = Marks()
        run.caller.hooks.append(hook)
        run.stepper.agreement.first = None  # the first step compares first values, beside what is counted here
        for _ in range(num_steps):
            with collectives() as calls:
                hook.calls, hook.marks = calls, []
                run.step()
            buckets = [(buffer.reduce_group, buffer.data.numel()) for buffer in run.store.buffers]
            found.append((list(calls), hook.marks, buckets))
    return found


def assert_one_sequence(by_rank):
    for at in range(len(by_rank[0])):
        assert_same_sequence([found[at][0] for found in by_rank])


@pytest.mark.parametrize(("size", "num_micros"), [(2, 4), (4, 4), (2, 1)])
def test_one_reduction_per_bucket_and_step_in_the_last_backward(ranks, small, own, size, num_micros):
    """Of four micro-batches the first three issue none (with DDP's `no_sync` around the backwards alone they would)."""
    tables = small(FOUR_BUCKETS, batch__global_size=num_micros * size)
    by_rank = ranks(size)(steps, tables, own, 3)
    assert_one_sequence(by_rank)
    for found in by_rank:
        for step, (calls, marks, buckets) in enumerate(found):
            assert len(buckets) == 4
            learned = ["broadcast of 8 int64 with root 0"] if step == 1 else []
            first = [BEFORE_STEP, *learned]
            assert [str(call) for call in calls] == [*first, *(f"all_reduce of {n} float32" for _, n in buckets), AFTER_STEP]
            assert marks[:-1] == [len(first)] * (num_micros - 1)
            assert marks[-1] == len(first) + (len(buckets) if step else 0), "after the first step, within the backward"


PAIRS = [GroupEntry("pair", "main", (0, 1)), GroupEntry("pair", "main", (2, 3))]


def reduce_over_two_groups(run):
    """`layer1` reduces over pairs of ranks, `layer0` over each rank alone, the layers around them over all four."""
    limit = timedelta(seconds=30)
    pairs = make_groups(run.topology, run.world.rank, backend="gloo", timeout=limit, extra=PAIRS)
    run.parts = replace(run.parts, groups=Groups({**run.groups, "pair": pairs["pair"]}))
    run.groups = run.stepper.update.groups = run.store.reduction.groups = run.parts.groups
    run.stepper.agreement.first = None  # which knows of no pairs
    for param in run.registry:
        param.reduce_group = {"layer0": "sp", "layer1": "pair"}.get(param.name.partition(".")[0], "stage")
    run.store.lay_out(by_reduce_group)
    for handler in run.stepper.handlers:
        handler.attach(run.parts)


@pytest.mark.parametrize("reduction", ["same", "bf16"])
def test_two_reduce_groups_fill_their_buckets_side_by_side(ranks, small, own, reduction):
    """One order for all ranks of each group; every parameter is summed over its own group, and a group of one not at all."""
    tables = small(FOUR_BUCKETS | {"reduction": reduction}, batch__global_size=8)
    by_rank = ranks(4)(steps, tables, own, 3, prepare=reduce_over_two_groups)
    assert_one_sequence(by_rank)
    for found in by_rank:
        calls, _, buckets = found[-1]
        assert [group for group, _ in buckets] == ["stage", "stage", "pair"], "what a rank has alone lies in no bucket"
        sums = [call for call in calls if call.op in ("all_reduce", "all_to_all_single") and call.numel > 11]
        assert [len(call.ranks) for call in sums] == [4, 2, 4], "layer2, then layer1, then the first layer"
    whole = record(small(batch__global_size=8), 1, folder=own)
    found = [rank.gradients[0] for rank in ranks(4)(record, tables, 1, folder=own, prepare=reduce_over_two_groups)]
    within = 2**-7 if reduction == "bf16" else 1e-6
    for layer, parts in {"first": [0], "layer2": [0], "layer1": [0, 2], "layer0": [0, 1, 2, 3]}.items():
        name = f"{layer}.weight"
        total = torch.stack([found[rank][name] for rank in parts]).sum(0)
        assert_close_gradients({name: whole.gradients[0][name]}, {name: total}, within)


def test_narrow_sums_take_two_collectives_per_bucket(ranks, small, own):
    """Within the backward, except for the last bucket's second; one sequence on all ranks."""
    by_rank = ranks(3)(steps, small(FOUR_BUCKETS | {"reduction": "bf16"}, batch__global_size=12), own, 3)
    assert_one_sequence(by_rank)
    for found in by_rank:
        calls, marks, buckets = found[-1]
        sums = [str(call) for call in calls if call.dtype == "bfloat16"]
        even = -(-buckets[0][1] // 3) * 3
        assert len(sums) == 2 * len(buckets)
        assert sorted(set(sums)) == [f"all_gather_single of {even // 3} bfloat16", f"all_to_all_single of {even} bfloat16"]
        assert marks[-1] - marks[0] >= len(buckets), "the first ones run beside the backward"


def sent_and_held(tables, folder):
    """Returns the bytes that this rank sent in a step, those of its messages, and those that two calls of `trim` free."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        run.step()
        (handler,) = run.stepper.handlers
        held = sum(tensor.nbytes for _, tensor in handler.messages())
        return handler.counts()["sent_bytes_per_step"], held, handler.trim(), handler.trim()


def test_sums_count_what_they_send_and_free_their_messages(ranks, small, own):
    """Narrow ones send half as much, and have messages."""
    for (plain, nothing, *_), (narrow, held, freed, again) in zip(
        ranks(2)(sent_and_held, small(), own), ranks(2)(sent_and_held, small({"reduction": "bf16"}), own), strict=True
    ):
        assert 0 < narrow < 0.7 * plain
        assert nothing == 0
        assert (held == freed > 0, again) == (True, 0)

"""Tests the gradients of each bucket, and the collectives of a step with their order and time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sley_core.api.parts import ALIGNMENT_BYTES, split_by_size
from sley_core.protocols import SchedulerHook
from sley_testing.collectives import assert_same_sequence, collectives
from sley_testing.parity import assert_close_gradients
from sley_testing.runs import assert_equal_replicas, record, running

FOUR_BUCKETS = {"bucket_mb": 0.0005}
BEFORE_STEP = "all_reduce of 11 float64"
AFTER_STEP = "all_reduce of 6 float64"
"""The engine's sums at the start of a step (agreement) and at its end (loss, norm and votes)."""


@given(st.lists(st.integers(0, 50)), st.floats(0.5, 200))
def test_buckets_keep_order_and_limit_and_are_filled(sizes, limit):
    buckets = split_by_size(list(enumerate(sizes)), lambda item: item[1], limit)
    assert [item for bucket in buckets for item in bucket] == list(enumerate(sizes))
    totals = [sum(size for _, size in bucket) for bucket in buckets]
    assert all(total <= limit or len(bucket) == 1 for total, bucket in zip(totals, buckets, strict=True))
    for total, (after, *_) in zip(totals, buckets[1:], strict=False):
        assert total + after[1] > limit, "the next item would have fitted"


def bucket_layouts(tables, folder, num_steps=2):
    """Returns the names and size of each bucket before the first step and after each step."""
    with running(tables, folder) as run:
        results = []
        for number in range(num_steps + 1):
            if number:
                run.step()
            results.append([([param.name for param in buffer.params], buffer.num_bytes) for buffer in run.store.buffers])
    return results


@pytest.mark.sample(1)
@pytest.mark.parametrize(("compute", "itemsize", "max_bytes"), [("bf16", 4, 300), ("fp64", 8, 1536)])
def test_buckets_keep_their_limit_in_bytes(ranks, small, own, compute, itemsize, max_bytes):
    """The limit includes the alignment of accumulated gradients. Only a single parameter may exceed it."""
    tables = small({"bucket_mb": max_bytes / 2**20}, precision__compute=compute)
    for buckets in ranks(2)(bucket_layouts, tables, own)[0]:
        assert len({name for names, _ in buckets for name in names}) == 8
        for names, num_bytes in buckets:
            assert num_bytes <= max_bytes or len(names) == 1
            assert num_bytes >= sum(36 * itemsize if name.endswith("weight") else 6 * itemsize for name in names)
            assert num_bytes % ALIGNMENT_BYTES == 0


def test_buckets_have_the_reverse_order_of_use_in_every_step(ranks, small, own):
    for results in ranks(2)(bucket_layouts, small(FOUR_BUCKETS), own):
        names = [[params for params, _ in buckets] for buckets in results]
        assert names[0] == names[1] == names[2]
        assert names[0][0] == ["layer2.bias", "layer2.weight"]
        assert all(name.startswith("first.") for name in names[0][-1])


def test_ranks_with_different_orders_agree(ranks, small, own):
    """The backwards of two branches run in opposite orders on the ranks.

    The branches have equal sizes, so that different orders would sum them crosswise without an error.
    """
    tables = small({"bucket_mb": 0.0001}, model__factory="dp_parts:branches", precision__compute="fp64")
    reference, results = record(tables, 2, folder=own), ranks(2)(record, tables, 2, folder=own)
    for rank in results:
        assert_close_gradients(reference.gradients[1], rank.gradients[1], 1e-10)
    assert_equal_replicas(results)


class CollectiveCounts(SchedulerHook):
    """Records the number of collectives issued before the end of each backward."""

    def __init__(self):
        self.calls = []
        self.counts = []

    def after_backward(self, micro, input_gradient):
        self.counts.append(len(self.calls))


def step_collectives(tables, folder, num_steps):
    """Returns the collectives of each step, their number after each backward, and the buckets' groups and sizes."""
    results = []
    with running(tables, folder) as run:
        hook = CollectiveCounts()
        run.caller.hooks.append(hook)
        run.stepper.compare = None  # the first step compares first values, beside what is counted here
        for _ in range(num_steps):
            with collectives() as calls:
                hook.calls, hook.counts = calls, []
                run.step()
            buckets = [(buffer.reduce_group, buffer.data.numel()) for buffer in run.store.buffers]
            results.append((list(calls), hook.counts, buckets))
    return results


def assert_equal_sequences(by_rank):
    for index in range(len(by_rank[0])):
        assert_same_sequence([results[index][0] for results in by_rank])


@pytest.mark.sample(1)
@pytest.mark.parametrize(("size", "num_microbatches"), [(2, 4), (4, 4), (2, 1)])
def test_one_reduction_per_bucket_and_step_in_the_last_backward(ranks, small, own, size, num_microbatches):
    """The first three of four microbatches issue no collective."""
    tables = small(FOUR_BUCKETS, batch__global_size=num_microbatches * size)
    by_rank = ranks(size)(step_collectives, tables, own, 2)
    assert_equal_sequences(by_rank)
    for results in by_rank:
        for step, (calls, counts, buckets) in enumerate(results):
            assert len(buckets) == 4
            sums = [f"all_reduce of {n} float32" for _, n in buckets]
            assert [str(call) for call in calls] == [BEFORE_STEP, *sums, AFTER_STEP]
            assert counts[:-1] == [1] * (num_microbatches - 1)
            assert counts[-1] == 1 + (len(buckets) if step else 0), "after the first step, within the backward"


def test_bf16_sums_use_two_collectives_per_bucket(ranks, small, own):
    """All run within the backward except the last bucket's second, in the same order on all ranks."""
    by_rank = ranks(3)(step_collectives, small(FOUR_BUCKETS | {"reduction": "bf16"}, batch__global_size=6), own, 2)
    assert_equal_sequences(by_rank)
    for results in by_rank:
        calls, counts, buckets = results[-1]
        sums = [str(call) for call in calls if call.dtype == "bfloat16"]
        numel = -(-buckets[0][1] // 3) * 3
        assert len(sums) == 2 * len(buckets)
        assert sorted(set(sums)) == [f"all_gather_single of {numel // 3} bfloat16", f"all_to_all_single of {numel} bfloat16"]
        assert counts[-1] - counts[0] >= len(buckets), "the first collectives overlap with the backward"

"""Which collectives a step issues, when, and in which order: counted by the recorder on every rank."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.groups import Groups, make_groups
from sley_core.comm.world import World
from sley_core.engine.buffers import by_reduce_group
from sley_core.plan.load import plan_from_dict
from sley_core.topology import GroupEntry
from sley_testing.collectives import assert_same_sequence, collectives
from sley_testing.parity import assert_close_gradients
from sley_testing.runs import record

PER_STEP = ["all_reduce of 6 float64", "all_reduce of 6 float64"]
"""What the engine itself sums in a step: what ranks agree on, with the batch's weight; loss, norm and votes at the end."""


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
    """Per step: the collectives, how many had been issued after each backward, and the buckets with their groups."""
    seen = []
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
            seen.append((list(calls), hook.marks, buckets))
    return seen


def assert_one_sequence(by_rank):
    for at in range(len(by_rank[0])):
        assert_same_sequence([seen[at][0] for seen in by_rank])


@pytest.mark.parametrize("size", [2, 4])
def test_one_reduction_per_bucket_and_step_in_the_last_backward(ranks, small, own, size):
    """Of four micro-batches the first three issue none (with DDP's `no_sync` around the backwards alone they would)."""
    tables = small({"bucket_mb": 0.0005}, batch__global_size=4 * size)
    by_rank = ranks(size)(steps, tables, own, 3)
    assert_one_sequence(by_rank)
    for seen in by_rank:
        for step, (calls, marks, buckets) in enumerate(seen):
            learned = step == 1
            assert len(buckets) == 4
            texts = [str(call) for call in calls]
            first = PER_STEP[:1] + ["broadcast of 8 int64 with root 0"] * learned
            assert texts == first + [f"all_reduce of {numel} float32" for _, numel in buckets] + PER_STEP[1:]
            assert len(marks) == 4
            assert marks[:3] == [len(first)] * 3
            assert marks[3] == len(first) + (len(buckets) if step else 0), "after the first step, within the backward"


@pytest.mark.parametrize("num_micros", [1, 2, 4])
def test_as_many_reductions_as_optimizer_steps(ranks, small, own, num_micros):
    """However many micro-batches a step has, gradients are reduced when the optimizer steps: core alone counts them."""
    tables = small({"bucket_mb": 25.0}, batch__global_size=8, batch__micro_size=4 // num_micros)
    for seen in ranks(2)(steps, tables, own, 3):
        for calls, marks, buckets in seen:
            assert len(marks) == num_micros
            assert sum(call.dtype == "float32" for call in calls) == len(buckets) == 1


PAIRS = [GroupEntry("pair", "main", (0, 1)), GroupEntry("pair", "main", (2, 3))]


def reduce_over_two_groups(run):
    """`layer1` reduces over pairs of ranks, `layer0` over each rank alone, what lies around them over all four."""
    limit = timedelta(seconds=30)
    made = make_groups(run.topology, run.world.rank, backend="gloo", timeout=limit, extra=PAIRS)
    run.parts = replace(run.parts, groups=Groups({**run.groups, "pair": made["pair"]}))
    run.groups = run.stepper.update.groups = run.store.reduction.groups = run.parts.groups
    run.stepper.agreement.first = None  # which knows of no pairs
    for param in run.registry:
        param.reduce_group = {"layer0": "sp", "layer1": "pair"}.get(param.name.partition(".")[0], "stage")
    run.store.lay_out(by_reduce_group)
    for handler in run.stepper.handlers:
        handler.attach(run.parts)


@pytest.mark.sample(1)
@pytest.mark.parametrize("reduction", ["same", "bf16"])
def test_two_reduce_groups_fill_their_buckets_side_by_side(ranks, small, own, reduction):
    """One order for all ranks of each group; every parameter is summed over its own group, and a group of one not at all."""
    tables = small({"bucket_mb": 0.0005, "reduction": reduction}, batch__global_size=8)
    by_rank = ranks(4)(steps, tables, own, 3, prepare=reduce_over_two_groups)
    assert_one_sequence(by_rank)
    for seen in by_rank:
        _, _, buckets = seen[-1]
        assert [group for group, _ in buckets] == ["stage", "stage", "pair"], "what a rank has alone lies in no bucket"
        sums = [call for call in seen[-1][0] if call.op in ("all_reduce", "all_to_all_single") and call.numel > 6]
        assert [len(call.ranks) for call in sums] == [4, 2, 4], "layer2, then layer1, then the first layer"
    (whole,) = ranks(1)(record, small(batch__global_size=8), 1, folder=own)
    found = [seen.gradients[0] for seen in ranks(4)(record, tables, 1, folder=own, prepare=reduce_over_two_groups)]
    within = 2**-7 if reduction == "bf16" else 1e-6
    for name, parts in {"first": [0], "layer2": [0], "layer1": [0, 2], "layer0": [0, 1, 2, 3]}.items():
        name = f"{name}.weight"
        total = torch.stack([found[rank][name] for rank in parts]).sum(0)
        assert_close_gradients({name: whole.gradients[0][name]}, {name: total}, within)


def test_narrow_sums_take_two_collectives_per_bucket(ranks, small, own):
    """Within the backward, except for the last bucket's second; one sequence on all ranks."""
    by_rank = ranks(3)(steps, small({"reduction": "bf16", "bucket_mb": 0.0005}, batch__global_size=12), own, 3)
    assert_one_sequence(by_rank)
    for seen in by_rank:
        calls, marks, buckets = seen[-1]
        sums = [str(call) for call in calls if call.dtype == "bfloat16"]
        assert len(sums) == 2 * len(buckets)
        numel = buckets[0][1]
        even = -(-numel // 3) * 3
        assert sorted(set(sums)) == [f"all_gather_single of {even // 3} bfloat16", f"all_to_all_single of {even} bfloat16"]
        assert marks[-1] - marks[0] >= len(buckets), "the first ones run beside the backward"

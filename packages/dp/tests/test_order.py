"""What lies in which bucket, in which order buckets are reduced, and that this is agreed and overlaps the backward."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

import sley_core.engine.buffers
from sley_core.assemble import assemble
from sley_core.comm.backends import Direct
from sley_core.comm.world import World
from sley_core.engine.buffers import GradientBuffer
from sley_core.plan.load import plan_from_dict
from sley_core.sizes import ALIGNMENT_BYTES, split_by_size
from sley_testing.parity import assert_close_gradients
from sley_testing.runs import record, same_on_all


@given(st.lists(st.integers(0, 50)), st.floats(0.5, 200))
def test_fill_keeps_order_and_cap_and_wastes_no_bucket(sizes, cap):
    buckets = split_by_size(list(enumerate(sizes)), lambda item: item[1], cap)
    assert [item for bucket in buckets for item in bucket] == list(enumerate(sizes))
    totals = [sum(size for _, size in bucket) for bucket in buckets]
    assert all(total <= cap or len(bucket) == 1 for total, bucket in zip(totals, buckets, strict=True))
    for total, (after, *_) in zip(totals, buckets[1:], strict=False):
        assert total + after[1] > cap, "the next item would have fitted"


def contents(run):
    """Names and bytes of each bucket."""
    return [([param.name for param in buffer.params], buffer.num_bytes) for buffer in run.store.buffers]


def layouts(tables, folder, num_steps=3):
    """The buckets before the first step and after each."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        seen = [contents(run)]
        for _ in range(num_steps):
            run.step()
            seen.append(contents(run))
    return seen


@pytest.mark.sample(2)
@pytest.mark.parametrize("compute", ["bf16", "fp32", "fp64"])
@pytest.mark.parametrize("cap_bytes", [300, 1024, 1536])
def test_buckets_keep_their_cap_in_bytes(ranks, small, own, compute, cap_bytes):
    """The cap counts bytes of what is accumulated, alignment included; one parameter may exceed it."""
    tables = small({"bucket_mb": cap_bytes / 2**20}, precision__compute=compute)
    itemsize = 8 if compute == "fp64" else 4
    for buckets in ranks(2)(layouts, tables, own)[0]:
        assert len({name for names, _ in buckets for name in names}) == 8
        for names, num_bytes in buckets:
            assert num_bytes <= cap_bytes or len(names) == 1
            assert num_bytes >= sum(36 * itemsize if name.endswith("weight") else 6 * itemsize for name in names)
            assert num_bytes % ALIGNMENT_BYTES == 0


def test_the_first_bucket_holds_what_is_used_last_and_the_order_is_learned_once(ranks, small, own):
    """Reverse order of use at first; then what the first backward did, where biases come before weights."""
    for seen in ranks(2)(layouts, small({"bucket_mb": 0.0005}), own, 4):
        names = [[param for param, _ in buckets] for buckets in seen]
        assert names[0][0] == names[1][0] == ["layer2.bias", "layer2.weight"]
        assert sorted(names[2][0]) == ["layer2.bias", "layer2.weight"]
        assert names[2] == names[3] == names[4], "learned once"
        last = names[2][-1]
        assert all(name.startswith("first.") for name in last)


def memory_of_buffers(tables, folder):
    """The number of layouts of four steps, the last with a parameter frozen; pieces of memory; most bytes of them at once."""
    made = []
    most = 0

    class Counted(GradientBuffer):
        def __init__(self, *args):
            nonlocal most
            super().__init__(*args)
            storage = self.data.untyped_storage()
            made.append((StorageWeakRef(storage), storage.nbytes()))
            most = max(most, sum({one.cdata: size for one, size in made if not one.expired()}.values()))

    sley_core.engine.buffers.GradientBuffer = Counted
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        for step in range(4):
            if step == 3:
                run.registry.trainable[0].parameter.requires_grad_(False)
            run.step()
        return run.store.num_layouts, len({one.cdata for one, _ in made}), most


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_a_layout_takes_over_the_memory_of_the_one_before(ranks, small, own, compute):
    """Two are never there at once: buckets in another order lie where those before lay, after a freeze they are made anew."""
    tables = small(precision__compute=compute)
    one_layout = sum(num_bytes for _, num_bytes in ranks(2)(layouts, tables, own, 1)[0][0])
    assert ranks(2)(memory_of_buffers, tables, own) == [(4, 2, one_layout)] * 2


def orders(tables, folder):
    """The order in which the first step completed parameters here, and the one in which they are reported from then on."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
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
    assert seen.index("2.left.weight") < seen.index("2.right.weight"), "no reverse order of use"
    reference, found = record(tables, 3, folder=own), ranks(2)(record, tables, 3, folder=own)
    for rank in found:
        assert_close_gradients(reference.gradients[2], rank.gradients[2], 1e-10)
    same_on_all(found)


class Watched:
    """A reduction under way that notes in `events` when it starts and when somebody waits for it."""

    def __init__(self, pending, events, what):
        self.pending = pending
        self.events = events
        self.what = what
        events.append(("start", what))

    def test(self):
        return self.pending.test()

    def wait(self):
        self.events.append(("wait", self.what))
        self.pending.wait()

    def wait_sent(self):
        self.pending.wait_sent()


class Backwards:
    def __init__(self, events):
        self.events = events

    def before_backward(self, micro, output_gradient):
        self.events.append(("backward", micro.micro))

    def after_backward(self, micro, input_gradient):
        self.events.append(("end", micro.micro))

    def ignore(self, *args):
        pass

    before_forward = after_forward = before_loss = after_loss = ignore


def events_of_steps(tables, folder):
    """Per step: starts and ends of backwards and reductions, and completions of parameters, in the order they happened."""
    events, by_step = [], []
    real = Direct.all_reduce
    Direct.all_reduce = lambda *args, what, contents: Watched(real(*args, what=what), events, what)
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        run.caller.hooks.append(Backwards(events))
        run.store.on_ready.append(lambda param: events.append(("ready", param.name)))
        for _ in range(3):
            run.step()
            by_step.append(list(events))
            events.clear()
    return by_step


def test_reductions_start_in_the_last_backward_and_nobody_waits_in_it(ranks, small, own):
    """Each bucket is on its way before the next layer's gradients are complete; the first step's, after the backward."""
    tables = small({"bucket_mb": 0.0005}, batch__global_size=4, parallel__cross_memory_attach=False)
    for first, *later in ranks(2)(events_of_steps, tables, own):
        ends = first.index(("end", 1))
        assert all(first.index(event) > ends for event in first if event[0] in ("start", "wait", "ready"))
        for events in later:
            begins, ends = events.index(("backward", 1)), events.index(("end", 1))
            starts = [at for at, event in enumerate(events) if event[0] == "start"]
            waits = [at for at, event in enumerate(events) if event[0] == "wait"]
            assert len(starts) == len(waits) == 4
            assert all(begins < at < ends for at in starts)
            assert all(at > ends for at in waits)
            for start, next_start in pairwise(starts):
                between = [event for event in events[start:next_start] if event[0] == "ready"]
                assert len(between) == 2, "the gradients of the next bucket come while this one is on its way"
            assert [events[at][1] for at in starts] == [events[at][1] for at in waits]

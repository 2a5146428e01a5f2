"""Tests gradients and weights with unused, shared and frozen parameters, several dtypes, and different initial values."""

from pkgutil import resolve_name

import pytest
import torch
from dp_parts import batch, record_plans

from sley_core.comm.exchanges import SentBytes
from sley_core.comm.transport import MessageTransport
from sley_core.comm.world import World
from sley_core.engine.buffers import FlatBuffer
from sley_core.engine.registry import Param
from sley_core.errors import RunError
from sley_core.protocols import SchedulerHook
from sley_core.topology import Topology
from sley_dp.sums import Bf16Sums
from sley_testing.collectives import can_read_peers
from sley_testing.parity import assert_close_gradients
from sley_testing.runs import assert_equal_replicas, assert_parity, record, running

EVEN, ODD = (0, 2, 4, 6), (1, 3, 5, 7)
"""Samples without and with the flag."""

SMALL_BUCKETS = {"bucket_mb": 0.0005}


def test_gradients_of_unused_parameters_count_as_zero(ranks, small, own):
    """`never` is used on no rank, and `flagged` on one rank, the other, both or none. No rank waits."""
    handlers = [{"use": "core.each"}, SMALL_BUCKETS, {"reduction": "bf16"}]
    changes = {"model__factory": "dp_parts:sometimes", "batch__global_size": 8, "batch__micro_size": 2}
    plans = [small(handler, **changes) for handler in handlers]
    indices = [EVEN + ODD, ODD + EVEN, ODD + ODD, EVEN + EVEN, EVEN + ODD]
    batches = [batch(*step) for step in indices]
    reference = record(plans[0], 5, folder=own, batches=batches)
    by_plan = zip(*ranks(2, timeout_s=60)(record_plans, plans, own, 5, batches), strict=True)
    for handler, results in zip(handlers, by_plan, strict=True):
        assert_equal_replicas(results)
        tolerance = 2**-7 if "reduction" in handler else 1e-5
        for rank in results:
            for step, (expected, gradients) in enumerate(zip(reference.gradients, rank.gradients, strict=True)):
                assert_close_gradients(expected, gradients, tolerance if step else min(tolerance, 2**-8))
                assert not gradients["some.never.weight"].any()
                assert bool(gradients["some.flagged.weight"].any()) == any(index % 2 for index in indices[step])


def test_a_rank_without_gradients(ranks, small, own):
    """A rank whose samples reach no parameter does not wait."""
    tables = small(SMALL_BUCKETS, model__factory="dp_parts:only_flagged", precision__compute="fp64", batch__micro_size=2)
    batches = [batch(*step) for step in ((0, 2, 1, 3), (1, 3, 5, 7), (1, 3, 0, 2))]
    reference = record(tables, 3, folder=own, batches=batches)
    for rank in ranks(2, timeout_s=30)(record, tables, 3, folder=own, batches=batches):
        for expected, gradients in zip(reference.gradients, rank.gradients, strict=True):
            assert_close_gradients(expected, gradients, 1e-10)


def test_a_module_used_twice_under_recomputation(ranks, small, own):
    """Both uses count, in the first step and in overlapped steps, with both types of torch's checkpoint."""
    models = [{"factory": "dp_parts:twice", "options": {"reentrant": reentrant}} for reentrant in (True, False)]
    plans = [small(SMALL_BUCKETS, model=model, precision__compute="fp64") for model in models]
    for tables, results in zip(plans, zip(*ranks(2)(record_plans, plans, own, 3), strict=True), strict=True):
        assert_parity(record(tables, 3, folder=own), results, "fp64")
        assert_equal_replicas(results)


def steps_with_frozen(tables, folder):
    """Returns the gradients of each step and the final weights.

    The steps have all parameters trainable, `layer1` frozen, `layer1` unfrozen, all except a bias frozen, and all trainable.
    """
    results = []
    with running(tables, folder) as run:
        for changes in ({}, {"layer1": False}, {"layer1": True}, {"": False, "first.bias": True}, {"": True}, {}):
            for prefix, trainable in changes.items():
                for param in run.registry:
                    if param.name.startswith(prefix):
                        param.parameter.requires_grad_(trainable)
            run.step()
            results.append({param.name: run.store.gradient(param).clone() for param in run.store.params})
        return results, {param.name: param.parameter.detach().clone() for param in run.registry}


def test_freezing_and_unfreezing_between_steps(ranks, small, own):
    """Unfrozen parameters are reduced. Frozen parameters have no gradient and are in no bucket."""
    tables = small(SMALL_BUCKETS, precision__compute="fp64")
    reference, weights = steps_with_frozen(tables, own)
    assert [len(gradients) for gradients in reference] == [8, 6, 8, 1, 8, 8]
    for results, after in ranks(2)(steps_with_frozen, tables, own):
        for expected, gradients in zip(reference, results, strict=True):
            assert_close_gradients(expected, gradients, 1e-10)
        assert_close_gradients(weights, after, 1e-10)


def record_transports(handlers, small_plan, folder):
    """Records three steps of each handler over sockets, and over memory of peers, without messages of buckets."""

    def refuse(*args, label, checksum):
        raise AssertionError(label)

    plans = [small_plan | {"gradient_handlers": [handler]} for handler in handlers]
    sockets = record_plans([tables | {"parallel": {"cross_memory_attach": False}} for tables in plans], folder)
    MessageTransport.all_reduce = MessageTransport.reduce_scatter = refuse
    return list(zip(sockets, record_plans(plans, folder), strict=True))


@pytest.mark.skipif(not can_read_peers(), reason="memory of peers cannot be read here")
def test_memory_of_peers_and_sockets_give_the_same_bits(ranks, small, own):
    """Uses two ranks, whose sums have only one order, and more buckets than may be in flight."""
    handlers = [{"use": use, "bucket_mb": 0.0001} for use in ("dp.bucketed", "dp.sharded")]
    for pairs in zip(*ranks(2)(record_transports, handlers, small(), own), strict=True):
        assert_equal_replicas([result for pair in pairs for result in pair])


def test_the_size_of_a_bucket_changes_no_bit_of_sums_in_bf16(ranks, small, own):
    plans = [small({"reduction": "bf16", "bucket_mb": size}, batch__global_size=6) for size in (0.0003, 25.0)]
    reference = record(plans[0], 2, folder=own)
    results = [result for rank in ranks(3)(record_plans, plans, own) for result in rank]
    assert_equal_replicas(results)
    gradients = results[0].gradients[0]
    assert any(not torch.equal(value, gradients[name]) for name, value in reference.gradients[0].items()), "exact"


def sum_of_ones(num_terms):
    """Returns sums over all ranks, to which the first rank contributes `num_terms` and every other rank 1."""
    world = World.join("cpu")
    stage, rank = world.make_groups(Topology.from_sizes(world.size), 30)["stage"], world.rank
    results = []
    for numel in (1, 65, 1000):
        buffer = FlatBuffer([(numel,)], torch.float32, torch.device("cpu"))
        buffer.params = [Param("ones", (numel,), [])]
        buffer.data.fill_(1.0 if rank else num_terms)
        sums = Bf16Sums(SentBytes())
        sums.start(buffer, stage)
        sums.finish()
        results.append(buffer.data.unique().tolist())
    return results


def test_terms_are_added_in_fp32(ranks):
    """The sum is 256 + 1 + 1 + 1. In bf16, whose numbers above 256 differ by 2, each addition of 1 would be lost."""
    for results in ranks(4)(sum_of_ones, 256.0):
        assert results == [[260.0]] * 3, "259, rounded once"


# -- steps that fail ---------------------------------------------------------------------------------------------------


class LateReduction:
    """A reduction whose result is written only in `wait`."""

    def __init__(self, all_reduce, args, kwargs):
        index, self.tensor = next((index, arg) for index, arg in enumerate(args) if isinstance(arg, torch.Tensor))
        self.copy = self.tensor.clone()
        self.pending = all_reduce(*args[:index], self.copy, *args[index + 1 :], **kwargs)
        self.is_complete = False

    def is_completed(self):
        return self.is_complete

    def wait(self):
        if not self.is_complete:
            self.is_complete = True
            self.pending.wait()
            self.tensor.copy_(self.copy)

    wait_sent = wait


class SlowTransport(SchedulerHook):
    """Makes every reduction a `LateReduction`, which completes at the latest before the second backward of a step."""

    def __init__(self, owner):
        self.sent = []
        all_reduce = owner.all_reduce

        def send(*args, **kwargs):
            self.sent.append(LateReduction(all_reduce, args, kwargs))
            return self.sent[-1]

        owner.all_reduce = send

    def before_backward(self, micro, output_gradient):
        if micro.micro == 1:
            while self.sent:
                self.sent.pop().wait()


def fail_in_backward(run, micro, layer):
    """Runs a step that raises in the backward of microbatch `micro` at `layer`, and resets the data."""
    micro_numbers = iter(range(micro + 1))

    def fail(gradient):
        if next(micro_numbers) == micro:
            raise ValueError("as asked")

    hook = run.registry[f"{layer}.bias"].parameter.register_hook(fail)
    before = run.feed.state()
    with pytest.raises(ValueError, match="as asked"):
        run.step()
    hook.remove()
    run.feed.restore(before)


def steps_with_failures(tables, folder, late):
    """Returns the gradients of four steps, each after a step that fails in another microbatch or layer."""
    results = []
    with running(tables, folder) as run:
        run.caller.hooks.append(SlowTransport(resolve_name(late)))
        for micro, layer in ((0, "layer2"), (1, "first"), (1, "layer1"), (0, "first")):
            fail_in_backward(run, micro, layer)
            run.step()
            results.append({param.name: run.store.gradient(param).clone() for param in run.store.params})
    return results


@pytest.mark.parametrize(
    ("handler", "owner"),
    [
        (SMALL_BUCKETS, "sley_core.comm.transport:MessageTransport"),
        (SMALL_BUCKETS | {"reduction": "bf16"}, "sley_core.comm.world:Group"),
        pytest.param({"use": "core.each"}, "sley_core.comm.world:Group", marks=pytest.mark.campaign),
    ],
)
def test_a_reduction_of_a_failed_step_does_not_change_the_next_step(ranks, small, own, handler, owner):
    """Otherwise its result would be written while the next step accumulates in the same memory."""
    tables = small(handler, batch__global_size=4, parallel__cross_memory_attach=False)
    clean = ranks(2)(record, tables, 4, folder=own)
    for one, results in zip(clean, ranks(2)(steps_with_failures, tables, own, late=owner), strict=True):
        for before, after in zip(one.gradients, results, strict=True):
            assert_close_gradients(before, after, 1e-12)


def fail_on_one_rank(tables, folder):
    with running(tables, folder) as run:
        run.step()
        run.step()
        if run.world.rank == 1:
            fail_in_backward(run, 1, "layer2")
        else:
            run.step()


@pytest.mark.sample(1)
@pytest.mark.parametrize("attaches", [True, False])
def test_the_error_names_the_bucket_that_a_peer_does_not_reduce(ranks, small, own, attaches):
    """The other rank waits at most for the time limit, and its error names the bucket and the group."""
    tables = small({"bucket_mb": 0.0005}, batch__global_size=4, limits__collective_timeout_s=1.0)
    tables["parallel"] = {"cross_memory_attach": attaches}
    message = r"of the bucket of layer2\.\w+ over stage\[0, 1\] (with rank 1 )?failed on rank 0"
    with pytest.raises(RunError, match=message):
        ranks(2, timeout_s=20)(fail_on_one_rank, tables, own)

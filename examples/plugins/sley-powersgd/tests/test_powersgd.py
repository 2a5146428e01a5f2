"""`powersgd.reducer` computes the sums of torch's hook, loses no gradient, and keeps the contract of gradient handlers."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from sley_core.assemble import assemble
from sley_core.comm.groups import make_groups
from sley_core.comm.progress import SentBytes
from sley_core.comm.world import World
from sley_core.engine.buffers import FlatBuffer
from sley_core.engine.registry import Param
from sley_core.plan.load import plan_from_dict
from sley_core.topology import Topology
from sley_powersgd.handler import LowRankSums
from sley_powersgd.low_rank import as_matrix
from sley_powersgd.plugin import sley_gradient_handlers
from sley_testing.contract import ALONE, EACH, observe
from sley_testing.parity import assert_close_gradients, assert_same_bits, relative_errors
from sley_testing.runs import assert_parity, record, same_on_all

SHAPES = ((24, 40), (36,), (50, 4, 6), (3, 5))
"""A matrix, a vector, a tensor that counts as [50, 24], and one too small to be worth it."""


def stage_group():
    topology = Topology.of(dist.get_world_size())
    return make_groups(topology, dist.get_rank(), backend="gloo", timeout=timedelta(seconds=30))["stage"]


def bucket_of(shapes, dtype=torch.float64):
    """A buffer as the store has it, for `LowRankSums`."""
    buffer = FlatBuffer(shapes, dtype, torch.device("cpu"))
    buffer.params = [Param(f"parameter{at}", shape, []) for at, shape in enumerate(shapes)]
    return buffer


def gradients(step, shapes=SHAPES, dtype=torch.float64):
    """This rank's gradients of a step: a part that all ranks have, and noise of its own."""
    common = torch.Generator().manual_seed(1)
    own = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return [
        (torch.randn(shape, generator=common, dtype=torch.float64) + torch.randn(shape, generator=own, dtype=torch.float64)).to(
            dtype
        )
        for shape in shapes
    ]


def summed(sums, buffer, group, values):
    """What `sums` makes of this rank's `values`."""
    for view, value in zip(buffer.views, values, strict=True):
        view.copy_(value)
    sums.start(dict(zip(buffer.params, buffer.views, strict=True)), group)
    sums.finish()
    return [view.clone() for view in buffer.views]


class TorchBucket:
    """What `powerSGD_hook` asks of DDP's bucket."""

    def __init__(self, values):
        self.flat = torch.cat([value.flatten() for value in values])
        self.views = [view.view(value.shape) for view, value in zip(self.split(self.flat, values), values, strict=True)]

    @staticmethod
    def split(flat, values):
        return flat.split([value.numel() for value in values])

    def buffer(self):
        return self.flat

    def gradients(self):
        return self.views

    def index(self):
        return 0

    def is_last(self):
        return False


def beside_torch(rank, error_feedback, dtype, num_steps=5):
    """Our sums and torch's, step by step, from the same first factors; at the end the total of each one's errors."""
    torch.cuda.is_available = lambda: False  # else torch's hook synchronizes a device that CPU tensors do not have
    group = stage_group()
    ours, buffer = LowRankSums(rank, error_feedback, seed=7, sent=SentBytes()), bucket_of(SHAPES, dtype)
    theirs = PowerSGDState(group.lane(), rank, 2, use_error_feedback=error_feedback, orthogonalization_epsilon=1e-30)
    theirs.iter = 2
    pairs = []
    for step in range(num_steps):
        values = gradients(step, dtype=dtype)
        if step == 0:
            ours._divide(dict(zip(buffer.params, buffer.views, strict=True)))
            factors = [ours.states[param].q.flatten() for param in buffer.params if param in ours.states]
            theirs.q_memory_dict[0] = torch.cat(factors)
            theirs.p_memory_dict[0] = torch.zeros((24 + 50) * rank, dtype=dtype)
        bucket = TorchBucket([value.clone() for value in values])
        powerSGD_hook(theirs, bucket).wait()
        pairs.append((summed(ours, buffer, group, values), [view * group.size for view in bucket.views]))
    errors = None
    if error_feedback:
        mine = torch.cat([ours.states[buffer.params[at]].error.flatten() for at in (0, 2)])
        their_parts = TorchBucket.split(theirs.error_dict[0], values)
        errors = torch.stack([mine, torch.cat([their_parts[0], their_parts[2]])])
        dist.all_reduce(errors)
    return pairs, errors


@pytest.mark.parametrize("error_feedback", [True, False])
@pytest.mark.parametrize(("rank", "size", "dtype"), [(1, 2, "float64"), (2, 3, "float64"), (4, 2, "float32")])
def test_it_is_torchs_own_algorithm(ranks, rank, size, dtype, error_feedback):
    """torch's hook takes the mean and keeps each rank's distance from it; sums, and totals of what is kept, are alike."""
    within = 1e-10 if dtype == "float64" else 1e-4
    for pairs, errors in ranks(size)(beside_torch, rank, error_feedback, getattr(torch, dtype)):
        for ours, theirs in pairs:
            for mine, other in zip(ours, theirs, strict=True):
                assert (mine - other).norm() <= within * other.norm()
        if error_feedback:
            assert (errors[0] - errors[1]).norm() <= within * errors[0].norm()


def totals(rank, error_feedback, num_steps):
    """Given, due, and what all ranks together still keep, over some steps: one flat tensor each."""
    group = stage_group()
    sums, buffer = LowRankSums(rank, error_feedback, seed=7, sent=SentBytes()), bucket_of(SHAPES)
    due, given = (torch.zeros_like(buffer.data) for _ in range(2))
    for step in range(num_steps):
        values = gradients(step)
        for view, value in zip(buffer.views, values, strict=True):
            view.copy_(value)
        due += buffer.data
        summed(sums, buffer, group, values)
        given += buffer.data
    kept = torch.zeros_like(buffer.data)
    for param, view in zip(buffer.params, buffer.views, strict=True):
        view.zero_()
        if error_feedback and param in sums.states:
            as_matrix(view, rank).copy_(sums.states[param].error)
    kept.copy_(buffer.data)
    for total in (due, kept):
        dist.all_reduce(total)
    return given, due, kept


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_not_given_is_kept(ranks, size):
    """After any number of steps, given plus kept is due, to rounding: no gradient is lost, none counts twice."""
    for given, due, kept in ranks(size)(totals, 2, True, 7):
        assert (given + kept - due).norm() <= 1e-12 * due.norm()
        assert kept.norm() > 0.1 * due.norm(), "it is not exact"


def test_feedback_gives_everything_in_the_end(ranks):
    """The share still owed falls with the number of steps; without feedback what a step leaves out is lost."""

    def owed(feedback, num_steps):
        given, due, _ = ranks(2)(totals, 2, feedback, num_steps)[0]
        return float((given - due).norm() / due.norm())

    early, late, lost = owed(True, 10), owed(True, 60), owed(False, 60)
    assert late < 0.4 * early
    assert late < 0.6 * lost


def after_zeros(rank, zeros, ones):
    """The sum over the steps of a matrix that has no gradient in the first ones, and one of rank 1 afterwards."""
    group = stage_group()
    sums, buffer = LowRankSums(rank, True, seed=7, sent=SentBytes()), bucket_of([(24, 40)])
    one = torch.outer(torch.arange(1.0, 25), torch.arange(1.0, 41)).double()
    total = torch.zeros_like(one)
    for step in range(zeros + ones):
        total += summed(sums, buffer, group, [one if step >= zeros else torch.zeros_like(one)])[0]
    return float((total - group.size * ones * one).norm() / total.norm())


@pytest.mark.parametrize("rank", [1, 4])
def test_a_parameter_without_gradient_at_first_is_trained_later(ranks, rank):
    """With torch's hook such a parameter is NaN, or stays at zero for good: its factors cannot leave zero."""
    for error in ranks(2)(after_zeros, rank, 3, 4):
        assert error < 1e-12


def test_a_gradient_of_low_rank_is_summed_exactly(ranks, small, own, batches):
    """Equal samples on both ranks: a linear's gradient has rank 1, and the run is the exact one."""
    tables = small({"rank": 1, "bucket_mb": 0.0005}, precision__compute="fp64", batch__global_size=2)
    given = batches((3, 3), (8, 8), (5, 5))
    found = ranks(2)(record, tables, 3, folder=own, batches=given)
    assert_parity(record(tables, 3, folder=own, batches=given), found, "fp64")
    same_on_all(found)


def test_plain_sums_come_before_the_start_step(ranks, small, own):
    """Bit for bit those of `core.each`; the step itself, counted from 1, is the first that is compressed."""
    compressed = small({"rank": 1, "start_step": 3})
    exact = ranks(2)(record, small({"use": "core.each"}), 3, folder=own)
    for one, other in zip(exact, ranks(2)(record, compressed, 3, folder=own), strict=True):
        for before, after in zip(one.gradients[:2], other.gradients[:2], strict=True):
            assert_same_bits(before, after)
        errors = relative_errors(one.gradients[2], other.gradients[2])
        assert all((error > 0.01) == name.endswith("weight") for name, error in errors.items())


def given_and_kept(tables, folder, frozen_in=()):
    """As `totals`, of a whole run whose weights hardly move: what its steps gave, and what this rank keeps.

    frozen_in: steps in which `layer1.weight` is frozen.
    """
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        given = {param.name: torch.zeros_like(param.parameter) for param in run.registry}
        for step in range(6):
            run.registry["layer1.weight"].parameter.requires_grad_(step not in frozen_in)
            run.step()
            for param in run.store.params:
                given[param.name] += run.store.gradient(param)
        (handler,) = run.stepper.handlers
        states = handler.sums.states if tables["gradient_handlers"][0]["use"] == "powersgd.reducer" else {}
        kept = {param.name: state.error.clone() for param, state in states.items()}
    return given, kept


def test_small_buckets_lose_nothing(ranks, small, own):
    """A bucket for each gradient or two: over six steps, given plus kept is due."""
    plans = [
        small(handler, optimizer__lr=1e-12, precision__compute="fp64")
        for handler in ({"use": "core.each"}, {"rank": 1, "bucket_mb": 0.0005})
    ]
    due, _ = ranks(2)(given_and_kept, plans[0], own)[0]
    both = ranks(2)(given_and_kept, plans[1], own)
    for given, _ in both:
        found = {name: value + sum(kept[name] for _, kept in both) for name, value in given.items() if "weight" in name}
        assert_close_gradients({name: due[name] for name in found}, found, 1e-8)


def test_what_was_owed_to_a_frozen_parameter_is_forgotten(ranks, small, own):
    """It would belong to a model of long ago: it starts anew as if it had never been trained; others are not concerned."""
    tables = small({"rank": 1}, optimizer__lr=1e-12, precision__compute="fp64")
    never, later, first = (ranks(2)(given_and_kept, tables, own, steps) for steps in ((), (2, 3), (0, 1, 2, 3)))
    for (_, one), (_, two), (_, three) in zip(never, later, first, strict=True):
        assert torch.allclose(one["layer0.weight"], two["layer0.weight"], rtol=1e-8)
        assert torch.allclose(two["layer1.weight"], three["layer1.weight"], rtol=1e-8)
        assert not torch.allclose(one["layer1.weight"], two["layer1.weight"], rtol=1e-2)


def test_its_tolerance_is_what_the_contract_measures(ranks):
    """The worst relative error of the contract's first step; what is tolerated is not much more."""
    (record,) = [each for each in sley_gradient_handlers() if each.name == "reducer"]
    assert not record.exact
    errors = []
    for num_micros in (1, 3):
        exact, _ = ranks(2)(observe, [EACH], num_micros, False)
        found, _ = ranks(2)(observe, [{"use": "powersgd.reducer", "rank": 1}], num_micros, False)
        errors += relative_errors(exact.gradients[0], found.gradients[0], floor=1e-9).values()
        assert all(torch.equal(v, found.gradients[0][k]) for k, v in exact.gradients[0].items() if k.startswith(ALONE))
    assert 0.8 * record.tolerance < max(errors) <= record.tolerance


def test_training_with_feedback_keeps_up(ranks, small, own, batches):
    """At rank 1 of 6, the loss of eight samples falls about as far as with exact sums."""
    changes = {"run__steps": 50, "batch__global_size": 8, "optimizer__lr": 0.1}
    given = batches(range(8)) * 50
    exact, compressed = (
        [row["loss"] for row in ranks(2)(record, small({"rank": 1} | extra, **changes), 50, folder=own, batches=given)[0].rows]
        for extra in ({"start_step": 50}, {})
    )
    assert exact[-1] < 0.5 * exact[0]
    assert exact[0] - compressed[-1] > 0.9 * (exact[0] - exact[-1])

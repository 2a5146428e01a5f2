"""`powersgd.reducer` computes the sums of torch's hook, loses no gradient, and holds the contract of gradient handlers."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from sley_core.assemble import assemble
from sley_core.comm.group import Group
from sley_core.comm.groups import make_groups
from sley_core.comm.progress import SentBytes
from sley_core.comm.world import World
from sley_core.engine.buffers import FlatBuffer
from sley_core.engine.registry import Param
from sley_core.errors import RunError
from sley_core.plan.check import check_plan
from sley_core.plan.load import load_plan, plan_from_dict
from sley_core.topology import Topology
from sley_powersgd.handler import LowRankSums
from sley_powersgd.low_rank import as_matrix
from sley_powersgd.plugin import sley_gradient_handlers
from sley_testing.checkpointer_contract import assert_same_stretch, stretch
from sley_testing.collectives import assert_same_sequence, collectives
from sley_testing.contract import ALONE, EACH, GradientHandlerContract, observe
from sley_testing.parity import assert_same_bits, relative_errors
from sley_testing.plans import small_plan
from sley_testing.runs import record

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
    theirs = PowerSGDState(group.channel(), rank, 2, use_error_feedback=error_feedback, orthogonalization_epsilon=1e-30)
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


class TestPowerSGD(GradientHandlerContract):
    """Rank 1, which is the least; a larger rank would leave the small matrices of the contract's model whole."""

    handler: ClassVar[dict[str, Any]] = {"use": "powersgd.reducer", "rank": 1, "bucket_mb": 1e-5}


class TestPowerSGDWithoutFeedbackAfterPlainSums(GradientHandlerContract):
    handler: ClassVar[dict[str, Any]] = {"use": "powersgd.reducer", "rank": 1, "start_step": 2, "error_feedback": False}


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


# -- runs --------------------------------------------------------------------------------------------------------------


def plan(dp: int = 2, **options: Any) -> dict[str, Any]:
    """The small plan on `dp` ranks, without clipping, with these options of the reducer."""
    changes: dict[str, Any] = {"optimizer": {"use": "core.sgd", "lr": 0.05}, "precision": {"compute": "fp32"}, "run__steps": 8}
    handlers = [{"use": "powersgd.reducer", "rank": 1, **options}]
    return small_plan(parallel={"dp": dp}, gradient_handlers=handlers, **changes)


def test_plain_sums_come_before_the_start_step(ranks, texts):
    """Bit for bit those of `core.each`; the step itself, counted from 1, is the first that is compressed."""
    exact = ranks(2)(record, plan() | {"gradient_handlers": [EACH]}, 3, folder=texts)
    for one, other in zip(exact, ranks(2)(record, plan(start_step=3), 3, folder=texts), strict=True):
        for before, after in zip(one.gradients[:2], other.gradients[:2], strict=True):
            assert_same_bits(before, after)
        errors = relative_errors(one.gradients[2], other.gradients[2])
        assert all((error > 0.01) == ("norm" not in name) for name, error in errors.items()), errors


def kept(tables: dict[str, Any], folder: Path, frozen_in: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """What this rank keeps after six steps, in some of which one weight is frozen."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        for step in range(6):
            run.registry["head.output.weight"].parameter.requires_grad_(step not in frozen_in)
            run.step()
        (handler,) = run.stepper.handlers
        return {param.name: state.error.clone() for param, state in handler.sums.states.items()}


def test_what_was_owed_to_a_frozen_parameter_is_forgotten(ranks, texts):
    """It would belong to a model of long ago: it starts anew as if it had never been trained; others are not concerned."""
    tables = plan() | {"optimizer": {"use": "core.sgd", "lr": 1e-12}}
    never, later, first = (ranks(2)(kept, tables, texts, steps) for steps in ((), (2, 3), (0, 1, 2, 3)))
    frozen, other = "head.output.weight", "blocks.0.attention.query.weight"
    for one, two, three in zip(never, later, first, strict=True):
        torch.testing.assert_close(one[other], two[other], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(two[frozen], three[frozen], rtol=1e-4, atol=1e-6)
        assert not torch.allclose(one[frozen], two[frozen], rtol=1e-2)


def test_forgetting_waits_for_all_that_is_in_flight(monkeypatch):
    """A collective of a failed step would write into memory that the next step uses."""
    waiting = []

    def counted(*args, what):
        waiting.append(what)
        return SimpleNamespace(wait=lambda: waiting.remove(what))

    monkeypatch.setattr(Group, "all_reduce", counted)
    group = Group("stage", (0, 1), 0, {}, {})
    sums = LowRankSums(rank=1, error_feedback=True, seed=0, sent=SentBytes())
    for number in range(5):
        sums.start({Param(f"parameter{number}", (8, 8), []): torch.zeros(8, 8)}, group)
    assert len(waiting) == 5
    sums.forget()
    assert waiting == []
    sums.finish()


def after_a_nan(tables: dict[str, Any], folder: Path) -> tuple[str, int, int]:
    """The error of a step in which the second rank's gradient is not finite, how many states the next step begins with, and
    its number.
    """
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        run.step()
        weight = run.registry["head.output.weight"].parameter
        hook = weight.register_hook(lambda gradient: gradient * float("nan") if world.rank else gradient)
        with pytest.raises(RunError) as caught:
            run.step()
        hook.remove()
        (handler,) = run.stepper.handlers
        begin, sums = handler.begin_step, []
        handler.begin_step = lambda step: [begin(step), sums.append(len(handler.sums.states))]
        number = run.step()["step"]
        return caught.value.diagnostics[0].code, sums[0], number


def test_a_gradient_that_is_not_finite_on_one_rank_ends_all_in_the_same_step(ranks, texts):
    """The sum carries it to all ranks; the next step starts with new factors and errors."""
    assert ranks(2)(after_a_nan, plan(), texts) == [("not-finite", 0, 3)] * 2


@pytest.mark.parametrize("steps", [1, 3])
def test_the_same_layout_continues_bit_for_bit(ranks, texts, tmp_path, steps):
    """Before the first compressed step, and after it."""
    tables = plan(start_step=2)
    whole = ranks(2)(stretch, tables, 5, folder=texts)
    ranks(2)(stretch, tables, steps, folder=texts, save=tmp_path / "saved")
    assert_same_stretch(whole, ranks(2)(stretch, tables, 5 - steps, folder=texts, load=tmp_path / "saved"))


def test_in_another_layout_it_starts_anew_and_says_so(ranks, texts, tmp_path):
    ranks(4, 120)(stretch, plan(4), 2, folder=texts, save=tmp_path / "saved")
    found = ranks(2, 120)(stretch, plan(), 1, folder=texts, load=tmp_path / "saved")
    assert any("the state of gradient_handlers.0 powersgd.reducer is reset" in note for note in found[0].notes)


def calls_of_a_step(tables: dict[str, Any], folder: Path) -> tuple[list[Any], list[int], float, int]:
    """The sums of a second step, how many there were when each backward ended, the bytes sent, and those of all gradients."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        run.step()
        marks: list[int] = []
        hook = SimpleNamespace(
            **dict.fromkeys(
                ("before_forward", "after_forward", "before_loss", "after_loss", "before_backward"), lambda *_: None
            ),
            after_backward=lambda *_: marks.append(sum(call.dtype == "float32" for call in calls)),
        )
        run.caller.hooks.append(hook)
        with collectives() as calls:
            run.step()
        size = sum(run.store.gradient(param).nbytes for param in run.registry)
        sums = [call for call in calls if call.dtype == "float32"]
        return sums, marks, run.counts["powersgd.reducer"]["sent_bytes_per_step"], size


def test_a_bucket_takes_two_collectives_the_first_in_the_last_backward(ranks: Callable[..., Any], texts: Path) -> None:
    by_rank = ranks(2)(calls_of_a_step, plan(bucket_mb=100.0 / 2**20), texts)
    assert_same_sequence([calls for calls, *_ in by_rank])
    for calls, marks, num_bytes, size in by_rank:
        matrices, norms = 2 + 2 * 7, 2 * 2 + 1  # each a bucket of its own, as long as it has more bytes than one may have
        assert len(calls) <= 2 * matrices + norms
        assert marks[0] == 0
        assert len(calls) - marks[1] <= matrices + 1, "P and what travels whole, within the backward"
        assert 0 < num_bytes < size / 3


# -- plans -------------------------------------------------------------------------------------------------------------


def test_the_plan_of_this_package_is_valid():
    plan = load_plan(Path(__file__).parents[1] / "plan.toml")
    assert check_plan(plan, plan.world()) == []


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"precision": {"compute": "fp16"}}, "handler-precision"),
        ({"precision": {"compute": "bf16", "gradients": "bf16"}}, "handler-precision"),
        ({"run": {"name": "short", "steps": 2, "device": "cpu"}}, "beyond-the-run"),
    ],
)
def test_what_it_cannot_work_in_is_refused(texts, changes, code):
    """Its errors would be of another loss scale; torch cannot factorise the gradients; it would never start."""
    assert check_plan(plan_from_dict(plan(start_step=3), texts), 2) == []
    (found,) = check_plan(plan_from_dict(plan(start_step=3) | changes, texts), 2)
    assert found.code == code

"""Tests that `powersgd.reducer` computes the sums of torch's hook, loses no gradient, and passes the contract of gradient
handlers.
"""

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
from sley_powersgd.low_rank import view_as_matrix
from sley_powersgd.plugin import sley_gradient_handlers
from sley_testing.checkpointer_contract import assert_same_stretch, stretch
from sley_testing.collectives import assert_same_sequence, collectives
from sley_testing.contract import ALONE, EACH, GradientHandlerContract, observe
from sley_testing.parity import assert_same_bits, relative_errors
from sley_testing.plans import small_plan
from sley_testing.runs import record

SHAPES = ((24, 40), (36,), (50, 4, 6), (3, 5))
"""A matrix, a vector, a tensor that counts as [50, 24], and a matrix that is too small to compress."""


def make_stage_group():
    topology = Topology.of(dist.get_world_size())
    return make_groups(topology, dist.get_rank(), backend="gloo", timeout=timedelta(seconds=30))["stage"]


def make_buffer(shapes, dtype=torch.float64):
    """Returns a buffer like those of the store."""
    buffer = FlatBuffer(shapes, dtype, torch.device("cpu"))
    buffer.params = [Param(f"parameter{index}", shape, []) for index, shape in enumerate(shapes)]
    return buffer


def gradients(step, shapes=SHAPES, dtype=torch.float64):
    """Returns this rank's gradients of a step: a part that is equal on all ranks, and local noise."""
    common = torch.Generator().manual_seed(1)
    local = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return [
        (
            torch.randn(shape, generator=common, dtype=torch.float64) + torch.randn(shape, generator=local, dtype=torch.float64)
        ).to(dtype)
        for shape in shapes
    ]


def run_sums(sums, buffer, group, values):
    """Returns the results of `sums` for this rank's `values`."""
    for view, value in zip(buffer.views, values, strict=True):
        view.copy_(value)
    sums.start(dict(zip(buffer.params, buffer.views, strict=True)), group)
    sums.finish()
    return [view.clone() for view in buffer.views]


class TorchBucket:
    """Implements the part of DDP's bucket that `powerSGD_hook` uses."""

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


def compare_with_torch(rank, error_feedback, dtype, num_steps=5):
    """Returns our sums and torch's of each step, from the same first factors, and the totals of both errors."""
    torch.cuda.is_available = lambda: False  # else torch's hook synchronizes a device that CPU tensors do not have
    group = make_stage_group()
    ours, buffer = LowRankSums(rank, error_feedback, seed=7, sent=SentBytes()), make_buffer(SHAPES, dtype)
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
        pairs.append((run_sums(ours, buffer, group, values), [view * group.size for view in bucket.views]))
    errors = None
    if error_feedback:
        our_errors = torch.cat([ours.states[buffer.params[index]].error.flatten() for index in (0, 2)])
        their_parts = TorchBucket.split(theirs.error_dict[0], values)
        errors = torch.stack([our_errors, torch.cat([their_parts[0], their_parts[2]])])
        dist.all_reduce(errors)
    return pairs, errors


@pytest.mark.parametrize("error_feedback", [True, False])
@pytest.mark.parametrize(("rank", "size", "dtype"), [(1, 2, "float64"), (2, 3, "float64"), (4, 2, "float32")])
def test_sums_match_torch_hook(ranks, rank, size, dtype, error_feedback):
    """Compares sums and total errors. torch's hook computes the mean, and keeps each rank's distance from it."""
    tolerance = 1e-10 if dtype == "float64" else 1e-4
    for pairs, errors in ranks(size)(compare_with_torch, rank, error_feedback, getattr(torch, dtype)):
        for ours, theirs in pairs:
            for actual, expected in zip(ours, theirs, strict=True):
                assert (actual - expected).norm() <= tolerance * expected.norm()
        if error_feedback:
            assert (errors[0] - errors[1]).norm() <= tolerance * errors[0].norm()


def accumulate_totals(rank, error_feedback, num_steps):
    """Returns flat tensors of all computed sums, the exact sums, and the remaining errors of all ranks, over some steps."""
    group = make_stage_group()
    sums, buffer = LowRankSums(rank, error_feedback, seed=7, sent=SentBytes()), make_buffer(SHAPES)
    expected, summed = (torch.zeros_like(buffer.data) for _ in range(2))
    for step in range(num_steps):
        values = gradients(step)
        for view, value in zip(buffer.views, values, strict=True):
            view.copy_(value)
        expected += buffer.data
        run_sums(sums, buffer, group, values)
        summed += buffer.data
    errors_after_freezing = torch.zeros_like(buffer.data)
    for param, view in zip(buffer.params, buffer.views, strict=True):
        view.zero_()
        if error_feedback and param in sums.states:
            view_as_matrix(view, rank).copy_(sums.states[param].error)
    errors_after_freezing.copy_(buffer.data)
    for total in (expected, errors_after_freezing):
        dist.all_reduce(total)
    return summed, expected, errors_after_freezing


@pytest.mark.parametrize("size", [2, 3])
def test_sums_and_errors_add_up(ranks, size):
    """Expects that computed sums plus errors equal the exact sums after any number of steps."""
    for summed, expected, errors_after_freezing in ranks(size)(accumulate_totals, 2, True, 7):
        assert (summed + errors_after_freezing - expected).norm() <= 1e-12 * expected.norm()
        assert errors_after_freezing.norm() > 0.1 * expected.norm(), "the sums are exact"


def test_feedback_reduces_missing_share(ranks):
    """Expects that the missing share falls with the number of steps. Without feedback, the residual of each step is lost."""

    def missing_share(feedback, num_steps):
        summed, expected, _ = ranks(2)(accumulate_totals, 2, feedback, num_steps)[0]
        return float((summed - expected).norm() / expected.norm())

    after_10_steps, after_60_steps, without_feedback = (
        missing_share(True, 10),
        missing_share(True, 60),
        missing_share(False, 60),
    )
    assert after_60_steps < 0.4 * after_10_steps
    assert after_60_steps < 0.6 * without_feedback


def error_after_zeros(rank, num_zeros, num_gradients):
    """Returns the relative error of the sum over steps: first without a gradient, then with a gradient of rank 1."""
    group = make_stage_group()
    sums, buffer = LowRankSums(rank, True, seed=7, sent=SentBytes()), make_buffer([(24, 40)])
    gradient = torch.outer(torch.arange(1.0, 25), torch.arange(1.0, 41)).double()
    total = torch.zeros_like(gradient)
    for step in range(num_zeros + num_gradients):
        total += run_sums(sums, buffer, group, [gradient if step >= num_zeros else torch.zeros_like(gradient)])[0]
    return float((total - group.size * num_gradients * gradient).norm() / total.norm())


@pytest.mark.parametrize("rank", [1, 4])
def test_parameter_recovers_from_zero_gradients(ranks, rank):
    """With torch's hook, such a parameter becomes NaN or stays zero."""
    for error in ranks(2)(error_after_zeros, rank, 3, 4):
        assert error < 1e-12


class TestPowerSGD(GradientHandlerContract):
    """Uses rank 1, since a larger rank would not compress the small matrices of the contract's model."""

    handler: ClassVar[dict[str, Any]] = {"use": "powersgd.reducer", "rank": 1, "bucket_mb": 1e-5}


class TestPowerSGDWithoutFeedbackAfterPlainSums(GradientHandlerContract):
    handler: ClassVar[dict[str, Any]] = {"use": "powersgd.reducer", "rank": 1, "start_step": 2, "error_feedback": False}


def test_tolerance_matches_contract_error(ranks):
    """Expects that the tolerance is slightly above the largest relative error of the contract's first step."""
    (record,) = [candidate for candidate in sley_gradient_handlers() if candidate.name == "reducer"]
    assert not record.exact
    errors = []
    for num_micro_batches in (1, 3):
        exact, _ = ranks(2)(observe, [EACH], num_micro_batches, False)
        compressed, _ = ranks(2)(observe, [{"use": "powersgd.reducer", "rank": 1}], num_micro_batches, False)
        errors += relative_errors(exact.gradients[0], compressed.gradients[0], floor=1e-9).values()
        assert all(torch.equal(v, compressed.gradients[0][k]) for k, v in exact.gradients[0].items() if k.startswith(ALONE))
    assert 0.8 * record.tolerance < max(errors) <= record.tolerance


# -- runs --------------------------------------------------------------------------------------------------------------


def make_plan(dp: int = 2, **options: Any) -> dict[str, Any]:
    """Returns the small plan on `dp` ranks, without clipping, with these options of the reducer."""
    changes: dict[str, Any] = {"optimizer": {"use": "core.sgd", "lr": 0.05}, "precision": {"compute": "fp32"}, "run__steps": 8}
    handlers = [{"use": "powersgd.reducer", "rank": 1, **options}]
    return small_plan(parallel={"dp": dp}, gradient_handlers=handlers, **changes)


def test_sums_are_exact_before_start_step(ranks, texts):
    """Expects the bits of `core.each` before the start step, which is counted from 1 and the first compressed step."""
    exact = ranks(2)(record, make_plan() | {"gradient_handlers": [EACH]}, 3, folder=texts)
    for expected, actual in zip(exact, ranks(2)(record, make_plan(start_step=3), 3, folder=texts), strict=True):
        for expected_gradients, actual_gradients in zip(expected.gradients[:2], actual.gradients[:2], strict=True):
            assert_same_bits(expected_gradients, actual_gradients)
        errors = relative_errors(expected.gradients[2], actual.gradients[2])
        assert all((error > 0.01) == ("norm" not in name) for name, error in errors.items()), errors


def errors_after_freezing(tables: dict[str, Any], folder: Path, frozen_in: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Returns this rank's errors after six steps. One weight is frozen in the steps `frozen_in`."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        for step in range(6):
            run.registry["head.output.weight"].parameter.requires_grad_(step not in frozen_in)
            run.step()
        (handler,) = run.stepper.handlers
        return {param.name: state.error.clone() for param, state in handler.sums.states.items()}


def test_frozen_parameter_loses_its_error(ranks, texts):
    """Expects that a frozen parameter starts with a zero error afterwards, and that other parameters are not affected."""
    tables = make_plan() | {"optimizer": {"use": "core.sgd", "lr": 1e-12}}
    unfrozen, frozen_later, frozen_first = (
        ranks(2)(errors_after_freezing, tables, texts, steps) for steps in ((), (2, 3), (0, 1, 2, 3))
    )
    frozen, trained = "head.output.weight", "blocks.0.attention.query.weight"
    for errors, later_errors, first_errors in zip(unfrozen, frozen_later, frozen_first, strict=True):
        torch.testing.assert_close(errors[trained], later_errors[trained], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(later_errors[frozen], first_errors[frozen], rtol=1e-4, atol=1e-6)
        assert not torch.allclose(errors[frozen], later_errors[frozen], rtol=1e-2)


def test_discard_waits_for_collectives(monkeypatch):
    """A pending collective of a failed step would write into memory of the next step."""
    pending = []

    def start_all_reduce(*args, label):
        pending.append(label)
        return SimpleNamespace(wait=lambda: pending.remove(label))

    monkeypatch.setattr(Group, "all_reduce", start_all_reduce)
    group = Group("stage", (0, 1), 0, {}, {})
    sums = LowRankSums(rank=1, error_feedback=True, seed=0, sent=SentBytes())
    for number in range(5):
        sums.start({Param(f"parameter{number}", (8, 8), []): torch.zeros(8, 8)}, group)
    assert len(pending) == 5
    sums.discard_in_flight()
    assert pending == []
    sums.finish()


def step_after_nan(tables: dict[str, Any], folder: Path) -> tuple[str, int, int]:
    """Returns the error code of a step with a non-finite gradient on the second rank, the number of states at the start of the
    next step, and that step's number.
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


def test_non_finite_gradient_fails_on_all_ranks(ranks, texts):
    """The sum propagates it to all ranks. The next step starts with new factors and errors."""
    assert ranks(2)(step_after_nan, make_plan(), texts) == [("not-finite", 0, 3)] * 2


@pytest.mark.parametrize("steps", [1, 3])
def test_resumed_run_is_bit_identical(ranks, texts, tmp_path, steps):
    """Resumes before and after the first compressed step."""
    tables = make_plan(start_step=2)
    uninterrupted = ranks(2)(stretch, tables, 5, folder=texts)
    ranks(2)(stretch, tables, steps, folder=texts, save=tmp_path / "saved")
    assert_same_stretch(uninterrupted, ranks(2)(stretch, tables, 5 - steps, folder=texts, load=tmp_path / "saved"))


def test_in_another_layout_it_starts_anew_and_says_so(ranks, texts, tmp_path):
    ranks(4, 120)(stretch, make_plan(4), 2, folder=texts, save=tmp_path / "saved")
    found = ranks(2, 120)(stretch, make_plan(), 1, folder=texts, load=tmp_path / "saved")
    assert any("the state of gradient_handlers.0 powersgd.reducer is reset" in note for note in found[0].notes)


def second_step_calls(tables: dict[str, Any], folder: Path) -> tuple[list[Any], list[int], float, int]:
    """Returns the sums of a second step, their number at the end of each backward, the sent bytes, and the bytes of all
    gradients.
    """
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        run.step()
        num_sums_per_backward: list[int] = []
        hook = SimpleNamespace(
            **dict.fromkeys(
                ("before_forward", "after_forward", "before_loss", "after_loss", "before_backward"), lambda *_: None
            ),
            after_backward=lambda *_: num_sums_per_backward.append(sum(call.dtype == "float32" for call in calls)),
        )
        run.caller.hooks.append(hook)
        with collectives() as calls:
            run.step()
        size = sum(run.store.gradient(param).nbytes for param in run.registry)
        sums = [call for call in calls if call.dtype == "float32"]
        return sums, num_sums_per_backward, run.counts["powersgd.reducer"]["sent_bytes_per_step"], size


def test_bucket_needs_two_collectives(ranks: Callable[..., Any], texts: Path) -> None:
    by_rank = ranks(2)(second_step_calls, make_plan(bucket_mb=100.0 / 2**20), texts)
    assert_same_sequence([calls for calls, *_ in by_rank])
    for calls, num_sums_per_backward, num_bytes, size in by_rank:
        matrices, norms = 2 + 2 * 7, 2 * 2 + 1  # each is a separate bucket
        assert len(calls) <= 2 * matrices + norms
        assert num_sums_per_backward[0] == 0
        assert len(calls) - num_sums_per_backward[1] <= matrices + 1, (
            "P and uncompressed gradients are sent within the backward"
        )
        assert 0 < num_bytes < size / 3


# -- plans -------------------------------------------------------------------------------------------------------------


def test_example_plan_is_valid():
    make_plan = load_plan(Path(__file__).parents[1] / "plan.toml")
    assert check_plan(make_plan, make_plan.world()) == []


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"precision": {"compute": "fp16"}}, "handler-precision"),
        ({"precision": {"compute": "bf16", "gradients": "bf16"}}, "handler-precision"),
        ({"run": {"name": "short", "steps": 2, "device": "cpu"}}, "beyond-the-run"),
    ],
)
def test_unsupported_plans_are_refused(texts, changes, code):
    """Covers fp16 (the error has another loss scale), bf16 gradients (torch cannot factorize them), and a start step after the
    end.
    """
    assert check_plan(plan_from_dict(make_plan(start_step=3), texts), 2) == []
    (problem,) = check_plan(plan_from_dict(make_plan(start_step=3) | changes, texts), 2)
    assert problem.code == code

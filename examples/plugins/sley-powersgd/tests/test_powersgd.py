"""Tests that `powersgd.reducer` computes the sums of torch's hook, loses no gradient, and passes the contract of gradient
handlers.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from sley_core.comm.exchanges import SentBytes
from sley_core.comm.world import Group, World
from sley_core.engine.buffers import FlatBuffer
from sley_core.engine.registry import Param
from sley_core.errors import RunError
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict
from sley_core.topology import Topology
from sley_powersgd.handler import LowRankSums, view_as_matrix
from sley_powersgd.plugin import sley_gradient_handlers
from sley_testing.contract import EACH, UNREDUCED_LAYER, GradientHandlerContract, observe_runs
from sley_testing.parity import assert_same_bits, relative_errors
from sley_testing.plans import small_plan
from sley_testing.runs import assert_same_run, record, running

SHAPES = ((24, 40), (36,), (50, 4, 6), (3, 5))
"""A matrix, a vector, a tensor that counts as [50, 24], and a matrix that is too small to compress."""


def make_stage_group():
    world = World.join("cpu")
    return world.make_groups(Topology.from_sizes(world.size), 30)["stage"]


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


@pytest.mark.sample(2)
@pytest.mark.parametrize("error_feedback", [True, False])
@pytest.mark.parametrize(("rank", "size", "dtype"), [(2, 3, "float64"), (4, 2, "float32"), (1, 2, "float64")])
def test_sums_match_torch_hook(ranks, rank, size, dtype, error_feedback):
    """Compares sums and total errors. torch's hook computes the mean, and keeps each rank's distance from it."""
    tolerance = 1e-10 if dtype == "float64" else 1e-4
    for pairs, errors in ranks(size)(compare_with_torch, rank, error_feedback, getattr(torch, dtype)):
        for ours, theirs in pairs:
            for actual, expected in zip(ours, theirs, strict=True):
                assert (actual - expected).norm() <= tolerance * expected.norm()
        if error_feedback:
            assert (errors[0] - errors[1]).norm() <= tolerance * errors[0].norm()


def accumulate_totals(cases):
    """Returns flat tensors of all computed sums, the exact sums, and the remaining errors of all ranks, for each case: whether
    errors are fed back, and a number of steps.
    """
    group = make_stage_group()
    results = []
    for error_feedback, num_steps in cases:
        sums, buffer = LowRankSums(2, error_feedback, seed=7, sent=SentBytes()), make_buffer(SHAPES)
        exact = summed = torch.zeros(())
        for step in range(num_steps):
            values = gradients(step)
            exact = exact + torch.cat([value.flatten() for value in values])
            summed = summed + torch.cat([value.flatten() for value in run_sums(sums, buffer, group, values)])
        errors = [torch.zeros_like(value) for value in values]
        for param, error in zip(buffer.params, errors, strict=True):
            if error_feedback and param in sums.states:
                view_as_matrix(error, 2).copy_(sums.states[param].error)
        remaining = torch.cat([error.flatten() for error in errors])
        for total in (exact, remaining):
            dist.all_reduce(total)
        results.append((summed, exact, remaining))
    return results


def test_sums_and_errors_add_up(ranks):
    """Computed sums plus errors equal the exact sums, so the missing share falls with the number of steps. Without feedback,
    the residual of each step is lost.
    """
    for few, many, lossy in ranks(2)(accumulate_totals, [(True, 10), (True, 60), (False, 60)]):
        for summed, exact, remaining in (few, many):
            assert (summed + remaining - exact).norm() <= 1e-12 * exact.norm()
        shares = [float((summed - exact).norm() / exact.norm()) for summed, exact, _ in (few, many, lossy)]
        assert shares[1] < 0.4 * shares[0]
        assert shares[1] < 0.6 * shares[2]


def error_after_zeros(rank):
    """Returns the relative error of the sum over seven steps: three with a gradient of zeros, then four with one of rank 1."""
    group = make_stage_group()
    sums, buffer = LowRankSums(rank, True, seed=7, sent=SentBytes()), make_buffer([(24, 40)])
    gradient = torch.outer(torch.arange(1.0, 25), torch.arange(1.0, 41)).double()
    total = sum(run_sums(sums, buffer, group, [gradient if step >= 3 else torch.zeros_like(gradient)])[0] for step in range(7))
    return float((total - group.size * 4 * gradient).norm() / total.norm())


def test_parameter_recovers_from_zero_gradients(ranks):
    """With torch's hook, such a parameter becomes NaN or stays zero."""
    for error in ranks(2)(error_after_zeros, 4):
        assert error < 1e-12


class TestPowerSGD(GradientHandlerContract):
    """Uses rank 1, since a larger rank would not compress the small matrices of the contract's model."""

    handler: ClassVar[dict[str, Any]] = {"use": "powersgd.reducer", "rank": 1, "bucket_mb": 1e-5}


@pytest.mark.campaign
class TestPowerSGDWithoutFeedbackAfterPlainSums(GradientHandlerContract):
    handler: ClassVar[dict[str, Any]] = {"use": "powersgd.reducer", "rank": 1, "start_step": 2, "error_feedback": False}


def test_tolerance_matches_contract_error(ranks):
    """The tolerance is slightly above the largest relative error of the contract's first step."""
    (record,) = [candidate for candidate in sley_gradient_handlers() if candidate.name == "reducer"]
    (_, exact), _ = ranks(2).once(observe_runs, [EACH], (1, 3), True)
    (_, compressed, _), _ = ranks(2).once(observe_runs, [TestPowerSGD.handler], (1, 3, 3), True)
    errors = relative_errors(exact.gradients[0], compressed.gradients[0], floor=1e-9)
    assert 0.5 * record.tolerance < max(errors.values()) <= record.tolerance
    assert all(
        torch.equal(v, compressed.gradients[0][k]) for k, v in exact.gradients[0].items() if k.startswith(UNREDUCED_LAYER)
    )


# -- runs --------------------------------------------------------------------------------------------------------------


def make_plan(dp: int = 2, **options: Any) -> dict[str, Any]:
    """Returns the small plan on `dp` ranks, without clipping, with these options of the reducer."""
    changes: dict[str, Any] = {"optimizer": {"use": "core.sgd", "lr": 0.05}, "precision": {"compute": "fp32"}, "run__steps": 8}
    handlers = [{"use": "powersgd.reducer", "rank": 1, **options}]
    return small_plan(parallel={"dp": dp}, gradient_handlers=handlers, **changes)


def record_plans(plans: tuple[dict[str, Any], ...], folder: Path) -> list[Any]:
    return [record(tables, 3, folder=folder) for tables in plans]


def test_sums_are_exact_before_start_step(ranks, texts):
    """Expects the bits of `core.each` before the start step, which is counted from 1 and the first compressed step."""
    plans = make_plan() | {"gradient_handlers": [EACH]}, make_plan(start_step=3)
    for expected, actual in ranks(2)(record_plans, plans, texts):
        for expected_gradients, actual_gradients in zip(expected.gradients[:2], actual.gradients[:2], strict=True):
            assert_same_bits(expected_gradients, actual_gradients)
        errors = relative_errors(expected.gradients[2], actual.gradients[2])
        assert all((error > 0.01) == ("norm" not in name) for name, error in errors.items()), errors


def errors_after_freezing(tables: dict[str, Any], folder: Path) -> list[dict[str, torch.Tensor]]:
    """Returns this rank's errors after three steps of three runs. One weight is frozen in no step, in the second, or
    in the first two.
    """
    results = []
    for frozen_steps in ((), (1,), (0, 1)):
        with running(tables, folder) as run:
            for step in range(3):
                run.registry["head.output.weight"].parameter.requires_grad_(step not in frozen_steps)
                run.step()
            (handler,) = run.stepper.handlers
            results.append({param.name: state.error.clone() for param, state in handler.sums.states.items()})
    return results


def test_frozen_parameter_loses_its_error(ranks, texts):
    """A frozen parameter starts with a zero error afterwards. Other parameters are not affected."""
    tables = make_plan() | {"optimizer": {"use": "core.sgd", "lr": 1e-12}}
    frozen, trained = "head.output.weight", "blocks.0.attention.query.weight"
    for never, later, first in ranks(2)(errors_after_freezing, tables, texts):
        torch.testing.assert_close(never[trained], later[trained], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(later[frozen], first[frozen], rtol=1e-4, atol=1e-6)
        assert not torch.allclose(never[frozen], later[frozen], rtol=1e-2)


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
    with running(tables, folder) as run:
        run.step()
        weight = run.registry["head.output.weight"].parameter
        hook = weight.register_hook(lambda gradient: gradient * float("nan") if run.world.rank else gradient)
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


def run_and_resume(tables: dict[str, Any], folder: Path, path: Path) -> tuple[Any, Any]:
    """Returns an uninterrupted run, and a run that was resumed after its first compressed step."""
    whole = record(tables, 4, folder=folder)
    record(tables, 2, folder=folder, save=path)
    return whole, record(tables, 2, folder=folder, load=path)


def test_resumed_run_is_bit_identical(ranks, texts, tmp_path):
    for whole, resumed in ranks(2)(run_and_resume, make_plan(start_step=2), texts, tmp_path / "saved"):
        assert_same_run(whole, resumed)


# -- plans -------------------------------------------------------------------------------------------------------------


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

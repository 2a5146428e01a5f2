"""Runs with `powersgd.reducer`: the contract, plans that are refused, failed steps, checkpoints, and what a step sends."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.groups import Group
from sley_core.comm.progress import SentBytes
from sley_core.comm.world import World
from sley_core.engine.registry import Param
from sley_core.errors import PlanError, RunError
from sley_core.plan.check import check_plan
from sley_core.plan.load import load_plan, plan_from_dict
from sley_powersgd import handler as module
from sley_testing.checkpointer_contract import assert_same_stretch, stretch
from sley_testing.collectives import assert_same_sequence, collectives
from sley_testing.contract import GradientHandlerContract
from sley_testing.parity import assert_same_bits
from sley_testing.plans import changed, small_plan
from sley_testing.runs import record

SMALL_BUCKETS = {"rank": 1, "bucket_mb": 0.0001}


class TestPowerSGD(GradientHandlerContract):
    """Rank 1, which is the least; a larger rank would leave the small matrices of the contract's model whole."""

    handler: ClassVar[dict] = {"use": "powersgd.reducer", "rank": 1, "bucket_mb": 1e-5}


class TestPowerSGDWithoutFeedbackAfterPlainSums(GradientHandlerContract):
    handler: ClassVar[dict] = {"use": "powersgd.reducer", "rank": 1, "start_step": 2, "error_feedback": False}


def test_the_plan_of_this_package_is_valid():
    plan = load_plan(Path(__file__).parents[1] / "plan.toml")
    assert check_plan(plan, plan.world()) == []


@pytest.mark.parametrize(
    ("reducer", "code", "words"),
    [
        ({"rank": 0}, "out-of-range", "at least 1"),
        ({"bucket_mb": 0.0}, "out-of-range", "above 0"),
        ({"reduction": "bf16"}, "unknown-key", "is not a key of `powersgd.reducer`"),
    ],
)
def test_wrong_tables(small, reducer, code, words):
    with pytest.raises(PlanError) as caught:
        plan_from_dict(small(reducer))
    (found,) = caught.value.diagnostics
    assert found.code == code
    assert words in f"{found.message} {found.hint}"


@pytest.mark.parametrize("precision", [{"compute": "fp16"}, {"gradients": "bf16"}])
def test_precisions_that_it_cannot_work_in_are_refused(small, precision):
    """Its errors would be of another loss scale, or torch could not factorise the gradients."""
    plan = plan_from_dict(small(precision={"compute": "bf16"} | precision))
    assert [problem.code for problem in check_plan(plan, 2)] == ["handler-precision"]


def test_a_compression_that_would_never_start_is_refused(small):
    (found,) = check_plan(plan_from_dict(small({"start_step": 9})), 2)
    assert (found.code, found.path) == ("beyond-the-run", ("gradient_handlers", 0, "start_step"))
    assert found.message == "the run has 8 steps, so nothing would be compressed"
    assert check_plan(plan_from_dict(small({"start_step": 8})), 2) == []


def steps_with_failures(tables, folder):
    """Gradients of four steps, before each of which a step fails: in another micro-batch, at another layer."""
    found = []
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        for micro, layer in ((0, "layer2"), (1, "first"), (1, "layer1"), (0, "first")):
            left, before = iter(range(micro + 1)), run.feed.state()

            def fail(gradient, left=left, micro=micro):
                if next(left) == micro:
                    raise ValueError("as asked")

            hook = run.registry[f"{layer}.bias"].parameter.register_hook(fail)
            with pytest.raises(ValueError, match="as asked"):
                run.step()
            hook.remove()
            run.feed.restore(before)
            run.step()
            found.append({param.name: run.store.gradient(param).clone() for param in run.store.params})
    return found


def test_steps_after_failed_ones_are_as_if_there_had_been_none(ranks, small, own):
    """Bit for bit, whichever micro-batch fails and however much of it is done."""
    tables = small(SMALL_BUCKETS)
    clean = ranks(2)(record, tables, 4, folder=own)
    for one, found in zip(clean, ranks(2)(steps_with_failures, tables, own), strict=True):
        for before, after in zip(one.gradients, found, strict=True):
            assert_same_bits(before, after)


def test_forgetting_waits_for_all_that_is_in_flight(monkeypatch):
    """A collective of a failed step would write into memory that the next step uses."""
    waiting = []

    def counted(*args, what):
        waiting.append(what)
        return SimpleNamespace(wait=lambda: waiting.remove(what))

    monkeypatch.setattr(module, "all_reduce", counted)
    group = Group("stage", (0, 1), 0, {}, {})
    sums = module.LowRankSums(rank=1, error_feedback=True, seed=0, sent=SentBytes())
    for number in range(5):
        sums.start({Param(f"parameter{number}", (8, 8), []): torch.zeros(8, 8)}, group)
    assert len(waiting) == 5
    sums.forget()
    assert waiting == []
    sums.finish()


def steps_until_it_ends(tables, folder):
    """How many steps are taken if the second rank's gradient of one parameter is not finite in the third; the error; and the
    numbers of the next steps.
    """
    steps, done = iter(range(9)), 0
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:

        def spoil(param):
            if param.name == "layer1.bias" and next(steps) == 2 and run.world.rank == 1:
                run.store.gradient(param).fill_(float("nan"))

        run.store.on_ready.insert(0, spoil)
        try:
            for _ in range(5):
                run.step()
                done += 1
        except RunError as error:
            return done, error.diagnostics[0].code, [run.step()["step"] for _ in range(2)]
    return done, None, []


def test_a_gradient_that_is_not_finite_on_one_rank_ends_all_in_the_same_step(ranks, small, own):
    """The sum carries it to all ranks; the next steps start with new factors and errors."""
    assert ranks(2)(steps_until_it_ends, small({"rank": 1}), own) == [(2, "not-finite", [4, 5])] * 2


def there_and_back(tables, folder, path, steps):
    """Six steps; so many, and a checkpoint; and the rest from there."""
    whole = stretch(tables, 6, folder=folder)
    stretch(tables, steps, folder=folder, save=path)
    return whole, stretch(tables, 6 - steps, folder=folder, load=path)


@pytest.mark.parametrize("steps", [1, 3])
def test_the_same_layout_continues_bit_for_bit(ranks, own, tmp_path, small, steps):
    tables = small({"rank": 1, "start_step": 2}, parallel={"dp": 3}, model__factory="powersgd_parts:branches")
    tables["batch"]["global_size"] = 3
    every = ranks(3, 120)(there_and_back, tables, own, tmp_path / "saved", steps)
    assert_same_stretch([one for one, _ in every], [other for _, other in every])


def test_in_another_layout_it_starts_anew_and_says_so(ranks, own, tmp_path, small):
    tables = small({"rank": 1, "start_step": 2})
    ranks(4, 120)(stretch, changed(tables, parallel={"dp": 4}), 3, folder=own, save=tmp_path / "saved")
    found = ranks(2, 120)(stretch, changed(tables, parallel={"dp": 2}), 1, folder=own, load=tmp_path / "saved")
    assert any("gradient_handlers.0 powersgd.reducer begins anew" in note for note in found[0].notes)


def calls_of_steps(tables, folder):
    """Per step: the collectives of floats, and how many there were when each backward ended."""
    seen = []
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        marks = []
        hook = SimpleNamespace(
            **dict.fromkeys(
                ("before_forward", "after_forward", "before_loss", "after_loss", "before_backward"), lambda *_: None
            ),
            after_backward=lambda *_: marks.append(sum(call.dtype == "float32" for call in calls)),
        )
        run.caller.hooks.append(hook)
        for _ in range(3):
            marks.clear()
            with collectives() as calls:
                run.step()
            seen.append(([call for call in calls if call.dtype == "float32"], list(marks)))
    return seen


def test_a_bucket_takes_two_collectives_the_first_in_the_last_backward(ranks, small, own):
    by_rank = ranks(3)(calls_of_steps, small(SMALL_BUCKETS, batch__global_size=12), own)
    assert_same_sequence([seen[-1][0] for seen in by_rank])
    for seen in by_rank:
        calls, marks = seen[-1]
        # Four buckets of a weight and a bias. A view is aligned to 64 elements: P and the bias take two such places, Q one.
        assert [str(call) for call in calls] == ["all_reduce of 128 float32"] * 4 + ["all_reduce of 64 float32"] * 4
        assert marks == [0, 0, 0, 4]


def sent(tables, folder):
    """Bytes that this rank sends in the second step, and bytes of all gradients."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        run.step()
        run.step()
        size = sum(run.store.gradient(param).nbytes for param in run.registry)
        return run.counts["powersgd.reducer"]["sent_bytes_per_step"], size


def test_it_counts_what_it_sends(ranks, texts):
    tables = small_plan(parallel={"dp": 2}, gradient_handlers=[{"use": "powersgd.reducer", "rank": 1}])
    for num_bytes, size in ranks(2)(sent, tables, texts):
        assert 0 < num_bytes < size / 3

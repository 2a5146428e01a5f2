"""fp16 through a pipeline: one scale for all, and an overflow anywhere is a step that nobody takes."""

from __future__ import annotations

import math
import os
from functools import partial

import pytest
import torch

from sley_testing.parity import assert_close_gradients, assert_same_bits
from sley_testing.plans import changed, small_plan
from sley_testing.runs import GRADIENTS, WEIGHTS, record

PLAN = small_plan(
    model={"use": "models.llama", "num_layers": 4, "hidden": 16, "heads": 2, "ffn_hidden": 24, "tie_embeddings": True},
    data={"use": "data.text", "source": "python-stdlib", "sequence": 12, "documents": "cut"},
    learning_rate={"use": "core.cosine", "warmup_steps": 2},
    precision__compute="fp16",
    run__steps=4,
)


def plan(schedule=None, pp=1, dp=1, **changes):
    cut = {"pipeline": {"use": schedule}, "parallel": {"pp": pp, "dp": dp}} if schedule else {}
    return changed(PLAN, **cut, **changes)


def batches(num):
    made = []
    for number in range(num):
        tokens = torch.randint(0, 256, (8, 13), generator=torch.Generator().manual_seed(number))
        made.append({"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()})
    return made


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("schedule", "pp", "dp"),
    [("pp.one_f_one_b", 2, 1), ("pp.interleaved", 2, 1), ("pp.zero_bubble_h1", 2, 2), ("pp.zero_bubble_v", 2, 1)],
)
def test_stages_are_the_one_process_run(ranks, schedule, pp, dp):
    """Within fp16's rounding, whether weight gradients come in B or, multiplied later, in W."""
    reference = record(plan(), 3, batches=batches(3))
    layouts = ranks(pp * dp, 120)(record, plan(schedule, pp, dp), 3, batches=batches(3))
    near, far = GRADIENTS["fp16"], WEIGHTS["fp16"]
    for layout in layouts:
        own = layout.gradients[0]
        assert_close_gradients({name: reference.gradients[0][name] for name in own}, own, near, floor=1e-6)
        assert_close_gradients({name: reference.weights[name] for name in layout.weights}, layout.weights, far)
        assert [row["loss_scale"] for row in layout.rows] == [65536.0] * 3
        for wanted, found in zip(reference.rows, layout.rows, strict=True):
            for key in ("loss", "grad_norm"):
                assert found[key] == pytest.approx(wanted[key], rel=near if wanted["step"] == 1 else far)


def overflow(run, rank, step):
    """A gradient of this rank's is infinite in the last micro-batch of `step`, which counts from 0."""
    if int(os.environ["RANK"]) != rank:
        return
    param = next(param for param in run.registry if "norm" in param.name)

    def spoil(gradient):
        state = run.store.state
        is_due = state.step == step and state.action.micro == state.num_micros - 1
        return torch.full_like(gradient, math.inf) if is_due else gradient

    param.parameter.register_hook(spoil)


def halve_after_the_first(run):
    """As if the step after it had overflowed, which never came."""

    def halve(row):
        if row["step"] == 1:
            scale = run.stepper.update.scale
            scale.restore(scale.state() | {"value": scale.value / 2, "num_good": 0})

    run.listeners.append(halve)


@pytest.mark.parametrize(
    ("schedule", "rank"), [("pp.zero_bubble_h1", 3), pytest.param("pp.one_f_one_b", 0, marks=pytest.mark.campaign)]
)
def test_an_overflow_on_one_stage_of_one_replica_skips_everywhere(ranks, schedule, rank):
    """What follows is the run that never had this step, bit for bit.

    Rank 0 is of the first stage and the first replica, rank 3 of the last and the last; no gradient of another stage is
    infinite, so only the vote tells it.
    """
    every = batches(4)
    tables = plan(schedule, 2, 2, model__num_layers=2)
    found = ranks(4, 120)(record, tables, 4, batches=every, prepare=partial(overflow, rank=rank, step=1))
    never = ranks(4, 120)(record, tables, 3, batches=[every[0], *every[2:]], prepare=halve_after_the_first)
    infinite = [not all(g.isfinite().all() for g in layout.gradients[1].values()) for layout in found]
    assert infinite == [True, True, False, False] if rank == 0 else [False, False, True, True]
    for one, other in zip(never, found, strict=True):
        assert [row["skipped"] for row in other.rows] == [0, 1, 0, 0]
        assert [row["loss_scale"] for row in other.rows] == [65536.0, 65536.0, 32768.0, 32768.0]
        assert_same_bits(one.weights, other.weights)
        for wanted, row in zip(one.rows, [other.rows[0], *other.rows[2:]], strict=True):
            for key in ("loss", "grad_norm", "lr", "loss_scale", "skipped"):
                assert row[key] == wanted[key], key


def scale_state(run, seen):
    run.listeners.append(lambda row: seen.append(run.stepper.update.scale.state()))


def record_states(tables, **arguments):
    seen = []
    record(tables, 3, prepare=partial(scale_state, seen=seen), **arguments)
    return seen


def test_a_stage_without_gradients_votes_and_skips_too(ranks):
    """Its weights are all frozen; the scale is far too large for the other stage, which says so."""
    frozen = [{"match": "blocks.2.*", "freeze": True}, {"match": "blocks.3.*", "freeze": True}]
    frozen += [{"match": "head.*", "freeze": True}]
    tables = plan(
        "pp.one_f_one_b",
        2,
        model__tie_embeddings=False,
        optimizer__groups=frozen,
        partition={"use": "pp.uniform"},
        precision__loss_scale={"init_scale": 2.0**40},
    )
    first, last = ranks(2)(record_states, tables, batches=batches(3))
    assert first == last
    assert first[-1] == {"value": 2.0**37, "num_good": 0, "num_skipped": 3}

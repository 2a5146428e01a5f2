"""fp16: a scale that moves as torch's, and steps that are skipped by all ranks or none."""

from __future__ import annotations

import math
import os
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sley_core.engine.totals import LARGEST, LossScale
from sley_core.errors import RunError
from sley_core.plan.tables import LossScaleTable
from sley_testing.parity import assert_close_gradients, assert_same_bits
from sley_testing.runs import record, same_on_all

FP16 = {"compute": "fp16"}


def torchs(config):
    """torch's scaler of the same rule, and a parameter and an optimizer to show it gradients with."""
    keys = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
    scaler = torch.amp.GradScaler("cpu", **{key: getattr(config, key) for key in keys})
    scaler.scale(torch.ones(()))  # it makes its state when it is first used
    parameter = torch.nn.Parameter(torch.zeros(1))
    return scaler, parameter, torch.optim.SGD([parameter], lr=1.0)


@given(
    st.lists(st.booleans(), max_size=40),
    st.sampled_from([2.0**10, 65536.0, 2.0**127]),
    st.sampled_from([(2.0, 0.5), (4.0, 0.25), (1.5, 0.75)]),
    st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_the_scale_moves_as_torchs(overflows, init_scale, factors, interval):
    """For any run of overflows, growth past the largest number included, while the minimum is far."""
    growth, backoff = factors
    config = LossScaleTable(
        init_scale=init_scale, growth_factor=growth, backoff_factor=backoff, growth_interval=interval, min_scale=1e-30
    )
    ours = LossScale(config)
    theirs, parameter, optimizer = torchs(config)
    taken = 0
    for step, overflowed in enumerate(overflows):
        parameter.grad = torch.tensor([math.inf if overflowed else theirs.get_scale()])
        before = parameter.item()
        theirs.step(optimizer)
        theirs.update()
        ours.update(step, overflowed=overflowed)
        taken += not overflowed
        assert (parameter.item() == before) == overflowed
        assert ours.value == pytest.approx(theirs.get_scale(), rel=1e-5)
        assert ours.state()["num_good"] == theirs.state_dict()["_growth_tracker"]
        assert ours.num_skipped == step + 1 - taken
        assert ours.value <= LARGEST


def test_a_state_is_gone_on_from():
    config = LossScaleTable(init_scale=64.0, growth_interval=3)
    ours = LossScale(config)
    for step, overflowed in enumerate([False, True, False, False]):
        ours.update(step, overflowed=overflowed)
    again = LossScale(config)
    again.restore(ours.state())
    assert again.state() == ours.state() == {"value": 32.0, "num_good": 2, "num_skipped": 1}
    again.update(4, overflowed=False)
    assert again.value == 64.0


def test_it_stops_at_its_minimum_and_then_gives_up():
    scale = LossScale(LossScaleTable(init_scale=10.0, min_scale=4.0))
    scale.update(0, overflowed=True)
    scale.update(1, overflowed=True)
    assert scale.value == 4.0
    with pytest.raises(RunError, match=r"the gradients of step 3 overflow .* smallest, 4; 2 steps were skipped") as caught:
        scale.update(2, overflowed=True)
    assert caught.value.diagnostics[0].code == "loss-scale-exhausted"


# -- runs --------------------------------------------------------------------------------------------------------------


def overflow(run, steps, rank=0):
    """One gradient of this rank's is infinite in one micro-batch of each of `steps`, which count from 0."""
    if int(os.environ.get("RANK", "0")) != rank:
        return
    param = next(param for param in run.registry if param.name.endswith("norm.weight"))

    def spoil(gradient):
        state = run.store.state
        return torch.full_like(gradient, math.inf) if state.step in steps and state.action.micro == 0 else gradient

    param.parameter.register_hook(spoil)


def halve_after_the_first(run):
    """As if the step after it had overflowed, which never came."""

    def halve(row):
        if row["step"] == 1:
            scale = run.stepper.update.scale
            scale.restore(scale.state() | {"value": scale.value / 2, "num_good": 0})

    run.listeners.append(halve)


def tokens(number):
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 16, (4, 13), generator=generator)
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def fp16(small, **changes):
    optimizer = {"use": "core.adamw", "lr": 1e-2, "clip_norm": 0.5}
    rate = {"use": "core.cosine", "warmup_steps": 2}
    return small(precision=dict(FP16), optimizer=optimizer, learning_rate=rate, run__steps=4, **changes)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_overflow_on_one_rank_is_a_step_that_never_was_on_all(ranks, own, small, rank):
    """Weights, AdamW's states and the learning rate's count go on as if the batch had not been there."""
    batches = [tokens(number) for number in range(4)]
    spoilt = partial(overflow, steps=(1,), rank=rank)
    found = ranks(2)(record, fp16(small), 4, folder=own, batches=batches, prepare=spoilt)
    never = [batches[0], *batches[2:]]
    expected = ranks(2)(record, fp16(small), 3, folder=own, batches=never, prepare=halve_after_the_first)
    for one, other in zip(expected, found, strict=True):
        assert_same_bits(one.weights, other.weights)
        skipped = other.rows.pop(1)
        assert skipped["skipped"] == 1
        assert skipped["loss_scale"] == 65536.0
        assert math.isfinite(skipped["loss"])
        assert not math.isfinite(skipped["grad_norm"])
        for wanted, row in zip(one.rows, other.rows, strict=True):
            same = ("loss", "grad_norm", "lr", "loss_scale", "skipped")
            assert {key: row[key] for key in same} == {key: wanted[key] for key in same}
    same_on_all(found)


def test_a_scale_that_is_far_too_large_comes_down_by_itself(alone, small):
    with alone(fp16(small, precision__loss_scale={"init_scale": 2.0**40})) as run:
        rows = [run.step() for _ in range(40)]
    skipped = [row["skipped"] for row in rows]
    num = sum(skipped)
    assert 5 < num < 35
    assert skipped == [1] * num + [0] * (40 - num), "and does not grow again within 2000 steps"
    assert rows[-1]["loss_scale"] == 2.0 ** (40 - num)
    assert rows[0]["lr"] == rows[num]["lr"], "what was skipped does not count"


def test_a_run_that_always_overflows_ends_on_all_ranks(ranks, own, small):
    scale = {"init_scale": 16.0, "min_scale": 4.0}
    tables = fp16(small) | {"precision": FP16 | {"loss_scale": scale}}
    for code, message in ranks(2)(exhausted, tables, own):
        assert code == "loss-scale-exhausted"
        assert "step 3" in message


def exhausted(tables, folder):
    try:
        record(tables, 4, folder=folder, prepare=partial(overflow, steps=range(4), rank=1))
    except RunError as error:
        return error.diagnostics[0].code, error.diagnostics[0].message
    return None


@pytest.mark.parametrize("kind", [1.0, 3.0, "inf"])
def test_gradients_and_their_norm_are_unscaled(alone, small, kind):
    """Whatever the scale, as it is a power of two; norm and clip see what the optimizer sees."""
    found = []
    for init_scale in (2.0**8, 2.0**10):
        tables = fp16(small) | {"precision": FP16 | {"loss_scale": {"init_scale": init_scale}}}
        tables["optimizer"] |= {"clip_kind": kind, "clip_norm": 0.01}
        with alone(tables) as run:
            row = run.step()
            found.append((row["grad_norm"], {e.name: run.store.gradient(e).clone() for e in run.store.params}))
    (one, ones), (other, others) = found
    assert one == pytest.approx(other, rel=1e-3)
    assert_close_gradients(ones, others, 1e-3, floor=1e-6)
    p = math.inf if kind == "inf" else kind
    clipped = torch.nn.utils.get_total_norm(list(ones.values()), p).item()
    assert clipped == pytest.approx(0.01, rel=1e-2)

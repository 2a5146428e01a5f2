"""A step whose loss or gradient norm is no number never was, on all ranks: skipped, refused, or with fp16's scale reduced."""

import math
import os
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sley_core.engine.totals import FP32_MAX, LossScale
from sley_core.errors import RunError
from sley_core.optim.optimizers import can_skip_on_device, step_if
from sley_core.plan.tables import LossScaleTable
from sley_testing.parity import assert_close_gradients, assert_same_bits
from sley_testing.runs import assert_equal_replicas, record, running, weights

SAME = ("loss", "grad_norm", "lr", "skipped", "loss_scale")


def tokens(number):
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 16, (4, 13), generator=generator)
    return {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def skipping(small, most=3, **changes):
    """AdamW with a schedule; `most` steps in a row may be skipped, or for None none but those of a loss scale."""
    optimizer = {"use": "core.adamw", "lr": 1e-2, "clip_norm": 0.5} | changes.pop("optimizer", {})
    rate = {"use": "core.cosine", "warmup_steps": 2}
    tables = small(optimizer=optimizer, learning_rate=rate, run__steps=6, **changes)
    if most is not None:
        tables["run"] |= {"on_nan": "skip", "max_skips": most}
    return tables


def fp16(small, **scale):
    return skipping(small, None, precision={"compute": "fp16", "loss_scale": scale})


def spoil(run, steps, rank, value=math.nan):
    """One element of one gradient of this rank's is `value` in each of `steps`, which count from 0."""
    if int(os.environ.get("RANK", "0")) != rank:
        return
    param = next(param for param in run.registry if param.trainable)

    def change(gradient):
        if run.store.state.step not in steps or run.store.state.action.micro != 0:
            return gradient
        gradient = gradient.clone()
        gradient.view(-1)[0] = value
        return gradient

    param.parameter.register_hook(change)


def as_if_it_never_was(found, expected):
    """`found` has the steps of `expected` and one more, the second, that was skipped."""
    for one, other in zip(expected, found, strict=True):
        assert_same_bits(one.weights, other.weights)
        skipped = other.rows.pop(1)
        assert (skipped["step"], skipped["skipped"]) == (2, 1)
        assert not math.isfinite(skipped["grad_norm"])
        for wanted, row in zip(one.rows, other.rows, strict=True):
            assert {key: row.get(key) for key in SAME} == {key: wanted.get(key) for key in SAME}
    assert_equal_replicas(found)


LAYOUTS = {
    "each": {},
    "inf-norm": {"optimizer": {"clip_kind": "inf"}},
    "momentum": {"optimizer": {"use": "core.sgd", "momentum": 0.9}},
    "bf16": {"precision": {"compute": "bf16"}},
    "fp16": {"precision": {"compute": "fp16"}, "most": None},
}


def halve_the_scale_after_the_first(run):
    """As if the step after it had overflowed, which never came."""

    def halve(row):
        if row["step"] == 1:
            scale = run.stepper.update.scale
            scale.restore(scale.state() | {"value": scale.value / 2, "num_good": 0})

    run.listeners.append(halve)


def record_each(tables, folder, cases):
    return [record(tables, num, folder=folder, batches=batches, prepare=prepare) for num, batches, prepare in cases]


@pytest.mark.sample(2)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_of_one_rank_skips_the_step_on_all(ranks, own, small, layout, rank, value):
    """Weights, the optimizer's states and the learning rate go on as if the batch had not been there."""
    batches = [tokens(number) for number in range(3)]
    tables = skipping(small, **LAYOUTS[layout])
    bad = partial(spoil, steps=(1,), rank=rank, value=value)
    prepare = halve_the_scale_after_the_first if layout == "fp16" else None
    cases = [(3, batches, bad), (2, [batches[0], batches[2]], prepare)]
    as_if_it_never_was(*zip(*ranks(2)(record_each, tables, own, cases), strict=True))


@pytest.mark.parametrize("kind", [1.0, 3.0, "inf"])
def test_gradients_and_their_norm_are_unscaled(alone, small, kind):
    """Whatever the scale, as it is a power of two; norm and clip see what the optimizer sees."""
    found = []
    for init_scale in (2.0**8, 2.0**10):
        tables = fp16(small, init_scale=init_scale)
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
    keys = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
    theirs = torch.amp.GradScaler("cpu", **{key: getattr(config, key) for key in keys})
    theirs.scale(torch.ones(()))  # it makes its state when it is first used
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
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
        assert ours.value <= FP32_MAX


def test_a_state_is_gone_on_from_and_the_smallest_scale_is_the_end():
    config = LossScaleTable(init_scale=64.0, growth_interval=3)
    ours = LossScale(config)
    for step, overflowed in enumerate([False, True, False, False]):
        ours.update(step, overflowed=overflowed)
    again = LossScale(config)
    again.restore(ours.state())
    assert again.state() == ours.state() == {"value": 32.0, "num_good": 2, "num_skipped": 1}
    again.update(4, overflowed=False)
    assert again.value == 64.0
    smallest = LossScale(LossScaleTable(init_scale=10.0, min_scale=4.0))
    for step in (0, 1):
        smallest.update(step, overflowed=True)
    assert smallest.value == 4.0
    with pytest.raises(RunError, match=r"exhausted.*step 3 overflow .* smallest loss scale, 4; 2 steps have already been"):
        smallest.update(2, overflowed=True)


def test_scale_grows_after_a_resume_with_a_shorter_interval():
    ours = LossScale(LossScaleTable(init_scale=64.0, growth_interval=3))
    ours.restore({"value": 64.0, "num_good": 7, "num_skipped": 0})
    values = []
    for step in range(5):
        ours.update(step, overflowed=False)
        values.append(ours.value)
    assert values == [64.0, 128.0, 128.0, 128.0, 256.0]


def go_on(tables, folder, spoilt=(), num=5):
    """`num` steps, of which those that fail are told and passed over: what was told, the rows, the weights."""
    told, rows = [], []
    with running(tables, folder) as run:
        spoil(run, spoilt, rank=1)
        for _ in range(num):
            before = weights(run)
            try:
                rows.append(run.step())
            except RunError as error:
                told.append(str(error.diagnostics[0]))
                assert_same_bits(before, weights(run))
        return told, rows, weights(run)


def test_after_too_many_in_a_row_the_run_ends_on_all_ranks_alike(ranks, own, small):
    """And a good step in between begins to count anew. A program that catches the error goes on as it does without skips."""
    first, second = ranks(2)(go_on, skipping(small, most=2), own, (0, 1, 3, 4, 5), 8)
    assert first[0] == second[0]
    assert first[0][0].startswith("error[not-finite]: step 6: loss ")
    assert "gradient norm nan; the 2 steps before were skipped; the gradient of " in first[0][0]
    for told, rows, _ in (first, second):
        assert [row["skipped"] for row in rows] == [1, 1, 0, 1, 1, 0, 0]
        assert len(told) == 1
    assert_same_bits(first[2], second[2])


class Late:
    """A device whose steps are read one step later, as CUDA's are."""

    is_async = True

    def __init__(self, device):
        self.device = device

    def __getattr__(self, name):
        return getattr(self.device, name)


def trained(tables, folder, monkeypatch=None):
    """All steps of a plan by `run.train`, read late with `monkeypatch`: rows and weights."""
    rows = []
    with running(tables, folder) as run:
        spoil(run, (1, 2), 0)
        run.listeners.append(rows.append)
        if monkeypatch is not None:
            for owner in (run.world, run.stepper, run.stepper.update):
                monkeypatch.setattr(owner, "device", Late(owner.device))
        assert run.train() == "finished"
        return [[row[key] for key in SAME[1:-1]] for row in rows], weights(run)


def test_a_step_that_is_read_while_the_next_one_runs_does_not_count_for_its_learning_rate(own, small, monkeypatch):
    tables = skipping(small)
    (rows, after), (late, other) = trained(tables, own), trained(tables, own, monkeypatch)
    assert str(rows) == str(late)  # nan is not itself
    assert [row[-1] for row in rows] == [0, 1, 1, 0, 0, 0]
    assert rows[1][1] == rows[2][1] == rows[3][1], "what was skipped does not count"
    assert_same_bits(after, other)


def test_after_a_loss_that_is_no_number_a_program_can_go_on(own, small, ranks):
    """Steps of four samples: the one that starts with the token 7 is the last of the second, and belongs to rank 1."""
    tables = small(
        model={"factory": "own_models:poisoned", "options": {"token": 7}},
        data__shuffle=False,
        optimizer={"use": "core.adamw", "lr": 0.01, "clip_norm": 1.0},
    )
    layouts = [go_on(tables, own), *ranks(2)(go_on, tables, own)]
    for told, rows, after in layouts:
        (message,) = told
        assert message.startswith("error[not-finite]: step 2: loss nan, gradient norm nan")
        assert [row["step"] for row in rows] == [1, 3, 4, 5], "a step that was not taken keeps its number"
        assert all(torch.isfinite(value).all() for value in after.values())
    assert "the gradient of 'head.bias' is not finite; samples 4, 5, 6, 7\n" in layouts[0][0][0]
    assert "; the loss of rank 1 is NaN; the gradient of 'head.bias' is not finite; samples 6, 7\n" in layouts[1][0][0]
    assert layouts[1][0] == layouts[2][0], "all ranks say the same"
    assert_same_bits(layouts[1][2], layouts[2][2])


def test_a_step_under_way_when_the_one_before_is_refused_is_told_by_the_next_call(own, small, monkeypatch):
    """As on a device that is not asynchronous: the same rows, learning rates and weights."""
    tables = small(
        model={"factory": "own_models:poisoned", "options": {"token": 7}},
        data__shuffle=False,
        run__steps=5,
        learning_rate={"warmup_steps": 4},
    )
    _, wanted, after = go_on(tables, own)
    told = []
    with running(tables, own) as run:
        monkeypatch.setattr(run.world, "device", Late(run.world.device))
        run.listeners.append(told.append)
        with pytest.raises(RunError, match=r"not-finite.*step 2: loss nan"):
            run.train()
        assert [row["step"] for row in told] == [1]
        assert run.train() == "finished"
        assert [(row["step"], row["lr"], row["loss"]) for row in told] == [
            (row["step"], row["lr"], row["loss"]) for row in wanted
        ]
        assert_same_bits(after, weights(run))


def test_a_listener_may_not_evaluate_weights_of_the_step_after(alone, small, monkeypatch):
    """On CUDA these are there already; on the CPU they are those of the row."""
    tables = small(evaluation={"every": 9, "steps": 1}, run__steps=3)
    with alone(tables) as run:
        run.listeners.append(lambda row: run.evaluate())
        assert run.train() == "finished"
    with alone(tables) as run:
        monkeypatch.setattr(run, "device", Late(run.device))
        run.listeners.append(lambda row: run.evaluate())
        with pytest.raises(RunError, match="step-running"):
            run.train()


def test_a_batch_of_which_nothing_counts_is_no_loss_of_zero(alone, small):
    """torch's own mean is NaN there; here nothing is changed, and the next step is taken as if it had not been."""
    import own_data

    with alone(small(evaluation={"every": 9, "steps": 1})) as run:
        before = weights(run)
        batch = own_data.batch(0, 4)
        batch["labels"][:] = -100
        with pytest.raises(RunError, match=r"error\[nothing-counts\]: step 1: the loss weight of the batch is 0"):
            run.step(batch)
        assert_same_bits(before, weights(run))
        assert run.step(own_data.batch(0, 4))["step"] == 2
        run.stepper.executor.loss.weight = lambda batch: 0.0
        with pytest.raises(RunError, match=r"nothing-counts\]: the loss weight of the evaluated samples is 0"):
            run.evaluate()
        run.stepper.executor.loss.weight = lambda batch: math.nan
        with pytest.raises(RunError, match=r"not-finite\]: the loss of the evaluated samples is nan"):
            run.evaluate()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_step_that_the_device_leaves_out_leaves_nothing(kind):
    """What CUDA does without asking the host; a CPU's fused kernels know the flag too."""
    torch.manual_seed(0)
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}

    def trained(skip_at):
        weight = torch.nn.Parameter(torch.ones(5))
        optimizer = kind([weight], lr=0.1, fused=True, **options)
        assert can_skip_on_device(optimizer)
        for step in range(4):
            is_bad = step == skip_at
            weight.grad = torch.full((5,), float("nan") if is_bad else 1.0 + step)
            if not (skip_at is None and step == 2):
                step_if(optimizer, torch.tensor(not is_bad))
        return weight.detach(), optimizer.state_dict()["state"]

    (skipped, states), (absent, wanted) = trained(2), trained(None)
    assert torch.equal(skipped, absent)
    for name, value in states[0].items():
        torch.testing.assert_close(value, wanted[0][name], rtol=0, atol=0)
    assert not can_skip_on_device(kind([torch.nn.Parameter(torch.ones(1))], lr=0.1))

"""What calls within `run.accumulate()` sum, and what may not come between them. In layouts: train-cli's tests."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from sley_core.errors import RunError, StateError, UsageError
from sley_testing.parity import assert_same_bits
from sley_testing.runs import GRADIENTS, gradients, weights


def cut(batch, *sizes):
    return [dict(zip(batch, each, strict=True)) for each in zip(*(value.split(sizes) for value in batch.values()), strict=True)]


def without_labels(batch):
    return {**batch, "labels": torch.full_like(batch["labels"], -100)}


def accumulated(run, parts):
    *first, last = parts
    with run.accumulate():
        rows = [run.step(part) for part in first]
    return [*rows, run.step(last)]


@pytest.mark.parametrize(
    ("precision", "changes"),
    [
        ("fp64", {"model__options": {"dropout": 0.5}}),
        ("bf16", {}),
        ("fp16", {}),
        ("fp64", {"precision__accumulation": "direct"}),
        ("fp64", {"gradient_handlers": [{"use": "core.each"}], "optimizer__clip_norm": 0.1}),
    ],
)
def test_they_equal_one_step_with_the_same_random_numbers(alone, small, precision, changes):
    """Bit for bit if the weight of all is that of the first call times a power of two, within rounding else."""
    tables = small(precision__compute=precision, **changes)
    with alone(tables) as run, alone(tables) as at_once:
        for _ in range(3):
            batch = run.feed.next()
            batch["labels"].clamp_(min=0)
            rows, wanted = accumulated(run, cut(batch, 1, 2, 1)), at_once.step(batch)
            assert rows[0].keys() == {"step", "loss"}
            assert (rows[-1]["lr"], rows[-1]["tokens"]) == (wanted["lr"], wanted["tokens"])
            assert_same_bits(gradients(at_once), gradients(run))
        assert_same_bits(weights(at_once), weights(run))
        batch["labels"][1:3] = -100
        batch["labels"][3, :5] = -100
        rows, wanted = accumulated(run, cut(batch, 1, 2, 1)), at_once.step(batch)
        for key in ("loss", "grad_norm"):
            assert rows[-1][key] == pytest.approx(wanted[key], rel=GRADIENTS[precision])


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_a_call_without_a_label_that_counts(alone, small, empty):
    with alone(small()) as run, alone(small()) as at_once:
        parts = cut(run.feed.next(), 1, 2, 1)
        parts[empty] = without_labels(parts[empty])
        rows = accumulated(run, parts)
        wanted = at_once.step({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
        assert rows[-1]["loss"] == pytest.approx(wanted["loss"], rel=1e-12)
        assert rows[-1]["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-12)
        if empty < 2:
            assert rows[empty]["loss"] == 0
        before = weights(run)
        with pytest.raises(RunError, match="nothing-counts"):
            accumulated(run, [without_labels(part) for part in parts])
        assert_same_bits(before, weights(run))


BETWEEN = {
    "training": lambda run: run.train(),
    "saving a checkpoint": lambda run: run.save_checkpoint("never"),
    "loading a checkpoint": lambda run: run.load_checkpoint("auto"),
    "loading weights": lambda run: run.load_weights({}),
}


@pytest.mark.parametrize("what", BETWEEN)
def test_what_belongs_between_two_steps_waits_for_the_end_of_the_step(alone, small, what):
    with alone(small()) as run, alone(small()) as at_once:
        batch = run.feed.next()
        first, second = cut(batch, 2, 2)
        for inside in (True, False):
            with run.accumulate():
                run.step(first)
                if inside:
                    with pytest.raises(StateError, match=f"within-step.*{what} comes between two steps"):
                        BETWEEN[what](run)
            with pytest.raises(StateError, match="within-step"):
                BETWEEN[what](run)
            assert run.step(second)["loss"] == pytest.approx(at_once.step(batch)["loss"], rel=1e-12)


def freeze(run):
    run.layers[1].module.inner.weight.requires_grad_(False)


def backward(run):
    run.layers[1].module(torch.ones(1, 12, 8, dtype=torch.float64)).sum().backward()


@pytest.mark.parametrize("reducer", ["core.each", "none"])
@pytest.mark.parametrize(("disturb", "code"), [(freeze, "frozen-within-step"), (backward, "gradient-")])
def test_gradients_that_are_no_longer_their_sum_are_refused(alone, small, disturb, code, reducer):
    """At the next call, and at each until the step has ended; the next step is as always."""
    tables = small() if reducer == "none" else small(gradient_handlers=[{"use": reducer}])
    with alone(tables) as run:
        first, second = cut(run.feed.next(), 2, 2)
        before = weights(run)
        with run.accumulate():
            run.step(first)
            with suppress(RunError):  # a backward that a hook of the store notices is refused itself
                disturb(run)
            with pytest.raises(RunError, match=code):
                run.step(second)
            with pytest.raises(RunError, match="accumulation-lost"):
                run.step(second)
        with pytest.raises(RunError, match="accumulation-lost"):
            run.step(second)
        assert_same_bits(before, weights(run))
        assert run.num_steps_done == 0
        for layer in run.layers:
            layer.module.requires_grad_(True)
        rows = accumulated(run, [first, second])
        with alone(tables) as other:
            assert rows[-1]["grad_norm"] == pytest.approx(accumulated(other, [first, second])[-1]["grad_norm"], rel=1e-12)


def test_canonical_sums_are_refused(alone, small):
    with alone(small(parallel={"reduction": "canonical"})) as run, pytest.raises(UsageError, match="accumulate-canonical"):
        run.accumulate()

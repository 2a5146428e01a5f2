"""Tests user code around linears under schedules that defer weight gradients, against a plain loop."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from sley_core.errors import SleyError
from sley_testing.habits import FULL_GRADIENT_HABITS, HABITS
from sley_testing.habits import layers as layers_of
from sley_testing.runs import assert_by_hand, record


def batch(step, sample):
    rows = [sample(8 * step + at) for at in range(8)]
    made = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    # How deep the last micro-batch goes: once in the first step, then twice, three times, once.
    made["tokens"][6, 0] = 4 * step
    return made


ONE_RANK_EACH = [
    habit for habit in HABITS | FULL_GRADIENT_HABITS if habit not in ("Mapped", "WrittenGradients", "Assigned")
]  # the warning of `Mapped` is an error in the ranks
TWO_RANKS_EACH = ["InPlace", "Adaptive", "Normed", "Frozen", "GradientWithin", "HookedWeights"]
CASES = [
    *(("pp.zero_bubble_h1", 1, habit) for habit in ONE_RANK_EACH),
    *(("pp.zero_bubble_v", 2, habit) for habit in TWO_RANKS_EACH),
]


@pytest.mark.parametrize("habit", ["WrittenGradients", "Assigned"])
def test_gradients_written_by_hooks_under_split_backwards(ranks, own, small, habit):
    """Hooks write gradients in place after I has queued them for W, or replace the sum."""
    test_habits_under_split_backwards(ranks, own, small, "pp.zero_bubble_h1", 1, habit)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("schedule", "dp", "habit"), CASES)
def test_habits_under_split_backwards(ranks, own, small, schedule, dp, habit):
    """Replicas have different samples and so different depths, but start their reductions in the same order."""
    from pp_parts import Rows, sample

    batches = [batch(step, sample) for step in range(4)]
    tables = small(
        schedule,
        pp=2,
        dp=dp,
        model={"factory": "sley_testing.habits:model", "options": {"habit": habit}},
        optimizer={"use": "core.sgd", "lr": 0.1},
    )
    layouts = ranks(2 * dp)(record, tables, len(batches), folder=own, batches=batches)
    first = {name: value for layout in layouts for name, value in layout.first.items()}
    for layout in layouts:
        by_hand = partial(torch.optim.SGD, lr=0.1)
        assert_by_hand(layout, layers_of(Rows.info, habit), batches, by_hand, micro_size=2, first=first)


def refused(tables, folder):
    with pytest.raises(SleyError) as caught:
        record(tables, 1, folder=folder)
    return caught.value.diagnostics[0]


@pytest.mark.parametrize(("how", "schedule"), [("itself", "pp.one_f_one_b"), ("passed on", "pp.zero_bubble_v")])
def test_a_layer_that_writes_a_batch_field_is_refused(ranks, own, small, how, schedule):
    """Other readers of the field may be on another stage, with a separate copy."""
    model = {"factory": "pp_parts:writes_fields", "options": {"how": how}}
    record(small(model=model), 1, folder=own)
    first, _ = ranks(2)(refused, small(schedule, 2, model=model, limits={"collective_timeout_s": 4}), own)
    assert first.code == "field-written"
    assert "'labels'" in first.message
    assert "embed" in first.message

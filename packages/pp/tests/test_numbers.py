"""Tests that pipelines equal the one-process run, and steps that only one stage refuses."""

import math
from functools import partial
from random import Random

import pytest
import torch
from pp_parts import write_csv

from sley_core.actions.action import Placement
from sley_core.errors import RunError, SleyError
from sley_testing.habits import FULL_GRADIENT_HABITS, HABITS
from sley_testing.habits import layers as layers_of
from sley_testing.parity import assert_same_bits
from sley_testing.plans import changed, small_plan
from sley_testing.runs import assert_matches_plain_loop, random_action_lists, record, running, weights

PLAN = small_plan(model__num_layers=4, model__tie_embeddings=True, run__steps=4, evaluation={"every": 2, "steps": 1})
WIDE = {"factory": "pp_parts:chain", "options": {"widths": [4] * 7}}
"""Eight layers: two for each part of a model that four stages hold in two parts each."""


def plan(schedule, pp, dp=1, **changes):
    return changed(PLAN, pipeline={"use": schedule}, parallel={"pp": pp, "dp": dp}, **changes)


def predict_any_number(run):
    """Predictions may have other numbers of microbatches than the schedule."""
    state, batch = run.feed.state(), run.feed.next()
    run.feed.restore(state)
    micros = [dict(zip(batch, rows, strict=True)) for rows in zip(*(value.split(2) for value in batch.values()), strict=True)]
    outputs = run.predict(micros) or []
    for one, other in zip(run.predict(micros[:-1]) or [], outputs[:-1], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("stages", "chunks", "seeds"), [(2, 3, range(1)), pytest.param(3, 2, range(3), marks=pytest.mark.campaign)]
)
def test_random_placements_and_orders(compare_with_one_process, texts, stages, chunks, seeds):
    """A file places neighbouring parts on the same, adjacent or other stages, and the model's ends anywhere."""
    plans = []
    for seed in seeds:
        chance = Random(seed)
        route = list(range(stages)) * chunks
        chance.shuffle(route)
        file = texts / f"{stages}.{chunks}.{seed}.csv"
        file.write_text(write_csv(random_action_lists(placement := Placement(tuple(route)), 4, chance), placement))
        pipeline = {"use": "pp.csv", "file": str(file)}
        plans.append(plan("pp.csv", stages) | {"pipeline": pipeline, "partition": {"use": "pp.uniform"}})
    compare_with_one_process(stages, plans, folder=texts, prepare=predict_any_number)


def test_blocks_of_different_widths_and_parametrized_weights(compare_with_one_process, small):
    """Each boundary has a different shape, and the partition has unequal weights.

    A stage does not read the parametrized weights of another stage, not even to count them.
    """
    model = {"factory": "pp_parts:chain", "options": {"widths": [4, 12, 3, 8, 2, 6]}}
    ways = {
        "pp.one_f_one_b": {"use": "pp.balanced"},
        "pp.gpipe": {"use": "pp.uniform"},
        "pp.zero_bubble_h1": {"use": "pp.explicit", "layers": [1, 5, 1]},
    }
    plans = [small(schedule, 3, model=model, partition=partition) for schedule, partition in ways.items()]
    plans.append(small("pp.one_f_one_b", 3, model={"factory": "pp_parts:computed"}))
    compare_with_one_process(3, plans)


@pytest.mark.parametrize("clip_kind", [3.0, pytest.param("inf", marks=pytest.mark.campaign)])
def test_norm_and_clip_with_a_stage_without_gradients(compare_with_one_process, small, clip_kind):
    """The second of two stages is frozen, with two replicas."""
    groups = [{"match": name, "freeze": True} for name in ("blocks.3.*", "blocks.4.*", "blocks.5.*", "head.*")]
    changes = {"optimizer__clip_norm": 0.01, "optimizer__groups": groups, "partition": {"use": "pp.uniform"}}
    tables = small("pp.one_f_one_b", 2, 2, model=WIDE, optimizer__clip_kind=clip_kind, **changes)
    (layouts,) = compare_with_one_process(4, [tables])
    assert [bool(layout.gradients[0]) for layout in layouts] == [True, True, False, False]


# -- steps that are not taken ------------------------------------------------------------------------------------------


NAME = "blocks.0.inner.weight"


def run_with_nan(tables, folder):
    """Returns the error of the second of three steps, with a NaN on the stage of `NAME`, and the third step's number."""
    with running(tables, folder) as run:
        spoils = [False, True, False]
        if NAME in run.registry.names:
            run.registry[NAME].parameter.register_hook(lambda grad: grad * math.nan if spoils[0] else grad)
        run.step()
        before = weights(run)
        spoils.pop(0)
        with pytest.raises(RunError) as caught:
            run.step()
        assert_same_bits(before, weights(run))
        spoils.pop(0)
        return str(caught.value.diagnostics[0]), run.step()["step"]


def test_all_stages_name_the_stage_with_a_nan(ranks, own, small):
    (message, step), other = ranks(2)(run_with_nan, small("pp.one_f_one_b", 2), own)
    assert (message, step) == other
    assert "error[not-finite]: step 2: loss " in message
    assert f"; the gradient of '{NAME}' (stage 0) is not finite; samples " in message
    assert step == 3


# -- what users write around linears -----------------------------------------------------------------------------------


def batch(step, sample):
    rows = [sample(8 * step + at) for at in range(8)]
    made = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    # How deep the last microbatch goes: once in the first step, then twice.
    made["tokens"][6, 0] = 4 * step
    return made


def record_all(plans, folder, batches):
    return [record(tables, len(batches), folder=folder, batches=batches) for tables in plans]


@pytest.mark.parametrize(
    ("schedule", "dp", "habits"),
    [
        ("pp.zero_bubble_h1", 1, ("WrittenGradients", "Assigned", "AdaptiveAgain", "Frozen")),
        ("pp.zero_bubble_v", 2, ("Adaptive", "HookedWeights")),
        pytest.param(  # the warning of `Mapped` is an error in ranks
            "pp.zero_bubble_h1", 1, [*HABITS.keys() - {"Mapped"}, *FULL_GRADIENT_HABITS], marks=pytest.mark.campaign
        ),
        pytest.param("pp.zero_bubble_v", 2, ("InPlace", "Normed", "Frozen", "GradientInForward"), marks=pytest.mark.campaign),
    ],
)
def test_habits_under_split_backwards(ranks, own, small, schedule, dp, habits):
    """Hooks write gradients in place after I has queued them for W, or replace the sum. Replicas have different samples and so
    different depths, but start their reductions in the same order.
    """
    from pp_parts import Rows, sample

    batches = [batch(step, sample) for step in range(2)]
    models = [{"factory": "sley_testing.habits:model", "options": {"habit": habit}} for habit in habits]
    plans = [small(schedule, 2, dp, model=model, optimizer={"use": "core.sgd", "lr": 0.1}) for model in models]
    by_rank = ranks(2 * dp, 120)(record_all, plans, own, batches)
    for habit, layouts in zip(habits, zip(*by_rank, strict=True), strict=True):
        first = {name: value for layout in layouts for name, value in layout.initial_weights.items()}
        for layout in layouts:
            by_hand = partial(torch.optim.SGD, lr=0.1)
            assert_matches_plain_loop(layout, layers_of(Rows.info, habit), batches, by_hand, micro_size=2, first=first)


def first_error(tables, folder):
    with pytest.raises(SleyError) as caught:
        record(tables, 1, folder=folder)
    return caught.value.diagnostics[0]


def test_a_layer_that_writes_a_batch_field_is_refused(ranks, own, small):
    """Other readers of the field may be on another stage, with a separate copy."""
    model = {"factory": "pp_parts:writes_fields"}
    record(small(model=model), 1, folder=own)
    first, _ = ranks(2)(first_error, small("pp.zero_bubble_v", 2, model=model, limits={"collective_timeout_s": 1}), own)
    assert first.code == "field-written"
    assert "'labels'" in first.message
    assert "embed" in first.message

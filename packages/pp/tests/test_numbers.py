"""Pipelines equal the one-process run: any schedule, any deal of the model, and steps that one stage alone refuses."""

from __future__ import annotations

import math
import os
from functools import partial
from random import Random

import pytest

from sley_core.actions.action import Placement
from sley_core.assemble import assemble
from sley_core.comm import collectives
from sley_core.comm.world import World
from sley_core.errors import RunError
from sley_core.plan.load import plan_from_dict
from sley_pp.schedules import write_csv
from sley_testing.parity import assert_same_bits
from sley_testing.plans import changed, small_plan
from sley_testing.runs import any_lists, record, weights

PLAN = small_plan(model__num_layers=4, model__tie_embeddings=True, run__steps=4, evaluation={"every": 2, "steps": 1})
SCHEDULES = ["pp.gpipe", "pp.one_f_one_b", "pp.interleaved", "pp.zero_bubble_h1", "pp.zero_bubble_v"]
WIDE = {"factory": "pp_parts:chain", "options": {"widths": [4] * 7}}
"""Eight layers: two for each part of a model that four stages hold in two parts each."""


def plan(schedule, pp, dp=1, **changes):
    return changed(PLAN, pipeline={"use": schedule}, parallel={"pp": pp, "dp": dp}, **changes)


def sizes(small, pp, micros, dp=1, **changes):
    """Plans of every schedule, whose steps have 24 samples, in so many micro-batches on each of `dp` replicas."""
    batches = [{"global_size": 24, "micro_size": 24 // (dp * num)} for num in micros]
    return [small(schedule, pp, dp, model=WIDE, batch=batch, **changes) for schedule in SCHEDULES for batch in batches]


@pytest.mark.parametrize(
    ("pp", "micros", "precision"),
    [
        (2, (2, 3), "fp32"),
        *(pytest.param(pp, (1, 2, 3, 4, 6, 8, 12, 24), "fp64", marks=pytest.mark.campaign) for pp in (2, 3, 4)),
        pytest.param(2, (2,), "bf16", marks=pytest.mark.campaign),
    ],
)
def test_any_number_of_micro_batches(compared, small, pp, micros, precision):
    """Fewer than stages, and no multiple of them. No two samples have as many labels, so a mean of means would differ."""
    compared(pp, sizes(small, pp, micros, precision__compute=precision), 3)


@pytest.mark.parametrize(
    ("stages", "schedules"),
    [
        (4, ["pp.zero_bubble_h1"]),
        pytest.param(3, ["pp.gpipe", "pp.one_f_one_b", "pp.zero_bubble_h1"], marks=pytest.mark.campaign),
    ],
)
def test_more_stages(compared, texts, stages, schedules):
    compared(stages, [plan(schedule, stages) for schedule in schedules], folder=texts)


def by_host(_run):
    collectives.goes_by_host = lambda *_: True


def test_stages_whose_messages_go_by_the_host(compared, texts):
    """As between stages that share a device, whose tensors gloo cannot send."""
    compared(2, [plan("pp.one_f_one_b", 2)], folder=texts, prepare=by_host)


@pytest.mark.parametrize(
    ("stages", "chunks", "seeds"), [(2, 3, range(2)), pytest.param(3, 2, range(3), marks=pytest.mark.campaign)]
)
def test_any_deal_of_the_model_and_any_order_that_can_run(compared, texts, stages, chunks, seeds):
    """From a file: neighbours on one stage, on stages beside each other or on others, the model's ends on any."""
    plans = []
    for seed in seeds:
        chance = Random(seed)
        route = list(range(stages)) * chunks
        chance.shuffle(route)
        file = texts / f"{stages}.{chunks}.{seed}.csv"
        file.write_text(write_csv(any_lists(placement := Placement(tuple(route)), 4, chance), placement))
        pipeline = {"use": "pp.csv", "file": str(file)}
        plans.append(plan("pp.csv", stages) | {"pipeline": pipeline, "partition": {"use": "pp.uniform"}})
    compared(stages, plans, folder=texts)


def test_five_blocks_of_unequal_width_on_three_stages(compared, small):
    """Each boundary has its own shape, and the partition sees unequal weights."""
    model = {"factory": "pp_parts:chain", "options": {"widths": [4, 12, 3, 8, 2, 6]}}
    ways = {
        "pp.one_f_one_b": {"use": "pp.balanced"},
        "pp.gpipe": {"use": "pp.uniform"},
        "pp.zero_bubble_h1": {"use": "pp.explicit", "layers": [1, 5, 1]},
    }
    compared(3, [small(schedule, 3, model=model, partition=partition) for schedule, partition in ways.items()])


def test_weights_that_are_computed_when_they_are_read(compared, small):
    """Nobody reads the weights of another stage's layers, not even to count them."""
    compared(2, [small("pp.one_f_one_b", 2, model={"factory": "pp_parts:computed"})])


def test_norm_and_clip_with_a_stage_without_gradients(compared, small):
    """The second of two stages is frozen whole; two replicas."""
    groups = [{"match": name, "freeze": True} for name in ("blocks.3.*", "blocks.4.*", "blocks.5.*", "head.*")]
    changes = {"optimizer__clip_norm": 0.01, "optimizer__groups": groups, "partition": {"use": "pp.uniform"}}
    kinds = [small("pp.one_f_one_b", 2, 2, model=WIDE, optimizer__clip_kind=p, **changes) for p in (3.0, "inf")]
    for layouts in compared(4, kinds):
        assert [bool(layout.gradients[0]) for layout in layouts] == [True, True, False, False]


# -- steps that are not taken ------------------------------------------------------------------------------------------


def overflow(run, rank):
    """Makes a gradient of this rank infinite in the last micro-batch of the second step."""
    if int(os.environ["RANK"]) == rank:
        state, param = run.store.state, next(param for param in run.registry if "norm" in param.name)
        param.parameter.register_hook(
            lambda grad: grad * math.inf if state.step == 1 and state.action.micro == state.num_micros - 1 else grad
        )


def halve_after_the_first(run):
    """As if the step after it had overflowed, which never came."""

    def halve(row):
        if row["step"] == 1:
            scale = run.stepper.update.scale
            scale.restore(scale.state() | {"value": scale.value / 2, "num_good": 0})

    run.listeners.append(halve)


def test_an_overflow_on_one_stage_of_one_replica_skips_everywhere(ranks, own, small):
    """What follows is the run that never had this step, bit for bit. No gradient of the other stage is infinite."""
    from pp_parts import sample
    from torch import stack

    samples = [[sample(8 * step + at) for at in range(8)] for step in range(4)]
    batches = [{name: stack([row[name] for row in rows]) for name in rows[0]} for rows in samples]
    schedule = {"learning_rate": {"use": "core.cosine", "warmup_steps": 2}, "run__steps": 4}
    tables = small("pp.zero_bubble_h1", 2, 2, precision__compute="fp16", **schedule)
    found = ranks(4, 120)(record, tables, 4, folder=own, batches=batches, prepare=partial(overflow, rank=3))
    never = ranks(4, 120)(record, tables, 3, folder=own, batches=[batches[0], *batches[2:]], prepare=halve_after_the_first)
    infinite = [not all(grad.isfinite().all() for grad in layout.gradients[1].values()) for layout in found]
    assert infinite == [False, False, True, True]
    for expected, other in zip(never, found, strict=True):
        assert [row["skipped"] for row in other.rows] == [0, 1, 0, 0]
        assert [row["loss_scale"] for row in other.rows] == [65536.0, 65536.0, 32768.0, 32768.0]
        assert_same_bits(expected.weights, other.weights)
        for row, their_row in zip([other.rows[0], *other.rows[2:]], expected.rows, strict=True):
            keys = ("loss", "grad_norm", "lr", "loss_scale", "skipped")
            assert [row[key] for key in keys] == [their_row[key] for key in keys]


NAME = "blocks.0.inner.weight"


def with_a_nan(tables, folder):
    """Returns the message of the second of three steps, spoilt on the stage that holds `NAME`, and the third step's number."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
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


def test_a_stage_with_a_nan_is_named_by_all(ranks, own, small):
    (message, step), other = ranks(2)(with_a_nan, small("pp.one_f_one_b", 2), own)
    assert (message, step) == other
    assert "error[not-finite]: step 2: loss " in message
    assert f"; first in the gradient of '{NAME}' (stage 0); samples " in message
    assert step == 3

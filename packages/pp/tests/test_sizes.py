"""Any schedule, number of stages, replicas and micro-batches gives one run."""

from __future__ import annotations

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_testing.collectives import collectives
from sley_testing.parity import assert_close_gradients, assert_same_bits
from sley_testing.runs import record

SCHEDULES = ["pp.gpipe", "pp.one_f_one_b", "pp.interleaved", "pp.zero_bubble_h1", "pp.zero_bubble_v"]
WIDE = {"factory": "pp_parts:chain", "options": {"widths": [4] * 7}}
"""Eight layers: two for each part of a model that four stages hold in two parts each."""


def sizes(small, pp, micros, dp=1, **changes):
    """Plans of every schedule, whose steps have 24 samples, in so many micro-batches on each of `dp` replicas."""
    batch = [{"global_size": 24, "micro_size": 24 // (dp * num)} for num in micros]
    return [small(schedule, pp, dp, model=WIDE, batch=one, **changes) for schedule in SCHEDULES for one in batch]


@pytest.mark.parametrize(
    ("pp", "micros"),
    [(2, (3,)), *(pytest.param(*one, marks=pytest.mark.campaign) for one in ((2, (1, 8)), (3, (4,)), (4, (1, 3, 8))))],
)
def test_micro_batches_fewer_than_stages_and_no_multiple_of_them(compared, small, pp, micros):
    """No two samples have as many labels, so a mean of means would differ."""
    compared(pp, sizes(small, pp, micros), 2)


@pytest.mark.campaign
@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_every_number_of_micro_batches(compared, small, pp, precision):
    """1, 2, 3, 4, 6, 8, 12 and 24 of them, on two to four stages."""
    compared(pp, sizes(small, pp, (1, 2, 3, 4, 6, 8, 12, 24), precision__compute=precision), 3)


@pytest.mark.campaign
def test_replicas_of_every_schedule(compared, small):
    """Two stages of two replicas; replicas stay equal bit for bit."""
    for layouts in compared(4, sizes(small, 2, (3,), dp=2), 2):
        for one, other in (layouts[:2], layouts[2:]):
            assert_same_bits(one.weights, other.weights)


def test_bf16_boundaries_with_as_many_micro_batches_as_stages(compared, small):
    """The interleaved schedule, and the others with it: all receives have the type of what is sent."""
    compared(2, sizes(small, 2, (2,), precision__compute="bf16"), 3)


@pytest.mark.campaign
def test_weights_after_eight_batches(compared, small):
    """1, 2 and 4 micro-batches on one replica or two of two stages; each is compared with its own one-process run."""
    plans = {(k, dp): small("pp.one_f_one_b", 2, dp, batch__micro_size=8 // (k * dp)) for k in (1, 2, 4) for dp in (1, 2)}
    ends = []
    for dp in (1, 2):
        every = compared(2 * dp, [plans[k, dp] for k in (1, 2, 4)], 8)
        ends += [[layout.weights for layout in layouts[::dp]] for layouts in every]
    for layout in ends[1:]:
        for one, other in zip(ends[0], layout, strict=True):
            assert_close_gradients(one, other, 1e-10)


def started(tables, folder):
    """For each of two steps: the reductions over this stage that ran, and the actions in which they began."""
    found = []
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        handler = run.stepper.handlers[0]
        ready = handler.gradient_ready
        actions = []

        def gradient_ready(param, step):
            action = run.store.state.action
            actions.append(AFTER if action is None else f"{action.kind.value}{action.chunk}.{action.micro}")
            ready(param, step)

        handler.gradient_ready = gradient_ready
        label = run.groups["stage"].ranks
        for _ in range(2):
            actions.clear()
            with collectives() as calls:
                run.step()
            sums = [call for call in calls if call.op == "all_reduce" and call.ranks == label and call.numel > 1]
            numels = [call.numel for call in sums if call.dtype != "int64"]  # those are fingerprints of first values
            found.append((numels, set(actions)))
        return found, sorted(param.numel for param in run.registry)


AFTER = "after a chunk's last action"
LAST = {
    "pp.gpipe": [{"B0.3"}, {"B0.3"}],
    "pp.one_f_one_b": [{"B0.3"}, {"B0.3"}],
    "pp.interleaved": [{"B1.3", "B0.3"}, {"B1.3", "B0.3"}],
    "pp.zero_bubble_h1": [{"W0.3", AFTER}] * 2,
    "pp.zero_bubble_v": [{"W0.3", "W1.3", AFTER}] * 2,
}
"""Of each stage: the actions in which a gradient may be complete, of four micro-batches."""


def started_in_all(plans, folder):
    return [started(tables, folder) for tables in plans]


@pytest.mark.parametrize(
    "schedules",
    [
        ["pp.interleaved", "pp.zero_bubble_h1"],
        pytest.param(["pp.gpipe", "pp.one_f_one_b", "pp.zero_bubble_v"], marks=pytest.mark.campaign),
    ],
)
def test_a_stage_reduces_once_per_step_and_in_its_last_backward(ranks, small, own, schedules):
    """Each gradient once, however many micro-batches; from the second step on as soon as it is complete.

    Of a split backward, in or after the last W of its chunk: it is there that gradients end.
    """
    plans = [small(schedule, 2, 2, model=WIDE, batch={"global_size": 8, "micro_size": 1}) for schedule in schedules]
    for rank, every in enumerate(ranks(4)(started_in_all, plans, own)):
        for schedule, (steps, numels) in zip(schedules, every, strict=True):
            for number, (reduced, actions) in enumerate(steps):
                assert sorted(reduced) == numels, schedule
                if number:
                    assert actions <= LAST[schedule][rank // 2], (schedule, rank, number)
                    assert "zero_bubble" in schedule or AFTER not in actions, "beside the backward, not behind it"


def test_no_two_layers_start_equal(ranks, small, own):
    """That weights do not depend on the stages is compared bit for bit everywhere."""
    tables = small("pp.gpipe", 2, model=WIDE)
    found = {}
    for layout in ranks(2)(record, tables, 1, folder=own):
        found |= {name: value for name, value in layout.first.items() if name.endswith("inner.weight")}
    values = list(found.values())
    assert len(values) == 6
    assert not any(torch.equal(one, other) for at, one in enumerate(values) for other in values[:at])


@pytest.mark.parametrize("norms", [[3.0, "inf"], pytest.param([1.0, 2.0], marks=pytest.mark.campaign)])
def test_norm_and_clip_with_a_stage_without_gradients(compared, small, norms):
    """The second of two stages is frozen whole; two replicas; the 1-, 2-, 3- and inf-norm."""
    groups = [{"match": name, "freeze": True} for name in ("blocks.3.*", "blocks.4.*", "blocks.5.*", "head.*")]
    changes = {"optimizer__clip_norm": 0.01, "optimizer__groups": groups, "partition": {"use": "pp.uniform"}}
    kinds = [small("pp.one_f_one_b", 2, 2, model=WIDE, optimizer__clip_kind=p, **changes) for p in norms]
    for layouts in compared(4, kinds):
        assert [bool(layout.gradients[0]) for layout in layouts] == [True, True, False, False]


def watch_the_update(run):
    """Keeps what the handlers left before norm, clip and optimizer have it."""
    step = run.stepper.update.step
    run.given = []

    def watched(*arguments):
        run.given.append({param.name: run.store.gradient(param).clone() for param in run.store.params})
        totals = step(*arguments)
        after = {param.name: run.store.gradient(param) for param in run.store.params}
        assert_same_bits(run.given[-1], after)
        return totals

    run.stepper.update.step = watched


def test_without_clip_gradients_are_not_touched(ranks, small, own):
    """With stages, a tie and replicas: not one bit."""
    model = {"factory": "pp_parts:tied", "options": {"ends": True}}
    tables = small("pp.zero_bubble_h1", 2, 2, model=model, optimizer={"use": "core.sgd", "lr": 0.1})
    for layout in ranks(4)(record, tables, 2, folder=own, prepare=watch_the_update):
        assert len(layout.rows) == 2

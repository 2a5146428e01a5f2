"""The oracle itself: each mistake that an engine could make in reducing, done on purpose, is caught by `assert_parity`.

Every mutation is made in the run of this rank, by the function that `record` calls before the first step.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist

from sley_core.comm.groups import Group, Groups
from sley_core.engine.step_batch import BatchWeight
from sley_testing.runs import alone, assert_parity, record

ENTRY = "blocks.1.inner.weight"


def nothing(run):
    """No mutation: what is caught below is the mutation's doing."""


def drop_a_reduction(run):
    """One parameter keeps this rank's own sum."""
    (handler,) = run.stepper.handlers
    reduce = handler.gradient_ready
    handler.gradient_ready = lambda param, step: None if param.name == ENTRY else reduce(param, step)


def reduce_over_the_wrong_group(run):
    """One parameter is summed over pairs of ranks instead of all four."""
    pairs = [(0, 1), (2, 3)]
    made = [dist.new_group(pair) for pair in pairs]
    at = run.world.rank // 2
    (handler,) = run.stepper.handlers
    wrong = Group("pairs", pairs[at], run.world.rank, {"main": made[at]})
    handler._groups = run.groups = Groups({**run.groups, "pairs": wrong})
    run.registry[ENTRY].reduce_group = "pairs"
    run.stepper.agreement.first = None  # which knows of no pairs


def divide_by_the_ranks_too(run):
    """The mean over ranks, as one would for losses that are means already."""
    (handler,) = run.stepper.handlers
    finish = handler.finish_step

    def finish_step(step):
        finish(step)
        for param in run.store.params:
            run.store.gradient(param).div_(run.world.size)

    handler.finish_step = finish_step


def divide_by_micro_batches_too(run):
    inverse = BatchWeight.inverse
    BatchWeight.inverse = lambda self, like: inverse(self, like) / run.store.state.num_micros


def weigh_each_rank_for_itself(run):
    """A mean of means: ranks whose labels count less weigh as much as the others."""
    stepper, begun = run.stepper, run.stepper._run
    own = [0.0]

    def noted(step, batch, *given, **named):
        own[0] = batch.weight
        return begun(step, batch, *given, **named)

    stepper._run = noted
    stepper._weight = lambda *_: BatchWeight(lambda: run.world.size * own[0])


def forget_the_first_micro_batch(run):
    """Each contribution overwrites the one before."""
    passed = type(run.store)._passed

    def overwrite(self, slot):
        passed(self, slot)
        slot.contributions = 0
        slot.parameter.grad = None

    type(run.store)._passed = overwrite


def start_elsewhere(run):
    """One rank's weight differs in its last bit, and nobody compares."""
    run.stepper.agreement.first = None
    if run.world.rank == run.world.size - 1:
        value = run.registry[ENTRY].parameter.data.view(-1)
        value[0] = value[0].nextafter(value[0] + 1)


@pytest.fixture
def compared(ranks, own, small):
    """`compared(mutation, num_ranks)`: compares ranks that are mutated with one process that is not."""

    def compared(mutation, num_ranks):
        tables = small(batch={"global_size": 8, "micro_size": 1})
        layouts = ranks(num_ranks)(record, tables, 2, folder=own, prepare=mutation)
        assert_parity(alone(tables, 2, folder=own), layouts, "fp64")

    return compared


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_what_is_not_mutated_passes(compared, num_ranks):
    compared(nothing, num_ranks)


@pytest.mark.parametrize(
    ("mutation", "num_ranks", "told"),
    [
        (drop_a_reduction, 2, f"1 of 19 differ.*\n  {ENTRY}"),
        (reduce_over_the_wrong_group, 4, f"1 of 19 differ.*\n  {ENTRY}"),
        (divide_by_the_ranks_too, 2, "19 of 19 differ.*\n.*: 0.5"),
        (divide_by_micro_batches_too, 2, "19 of 19 differ.*\n.*: 0.75"),
        (weigh_each_rank_for_itself, 2, "19 of 19 differ"),
        (forget_the_first_micro_batch, 2, "19 of 19 differ"),
        (start_elsewhere, 2, f"1 of 19 differ\n  {ENTRY}"),
    ],
)
def test_a_mutation_is_caught(compared, mutation, num_ranks, told):
    with pytest.raises(AssertionError, match=told):
        compared(mutation, num_ranks)

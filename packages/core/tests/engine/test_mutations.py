"""The oracle itself: each mistake in weighing and adding, made on purpose, is caught by `assert_parity`.

Every mutation is made in the run of this rank, by the function that `record` calls before the first step. Mistakes in reducing
over groups are in pp's tests.
"""

from __future__ import annotations

import pytest

from sley_core.engine.step_batch import BatchWeight
from sley_testing.runs import assert_parity, record, record_reference


def divide_by_micro_batches_too(run):
    inverse = BatchWeight.inverse
    BatchWeight.inverse = lambda self, like: inverse(self, like) / run.store.state.num_micros


def weigh_each_rank_for_itself(run):
    """A mean of means: ranks whose labels count less weigh as much as the others."""
    stepper, begun = run.stepper, run.stepper._run
    own = [0.0]

    def noted(step, batch, *given, **named):
        own[0] = sum(batch.weights)
        return begun(step, batch, *given, **named)

    stepper._run = noted
    stepper._global_weight = lambda: run.world.size * own[0]


def forget_the_first_micro_batch(run):
    """Each contribution overwrites the one before."""
    passed = type(run.store)._count_pass

    def overwrite(self, slot):
        passed(self, slot)
        slot.contributions = 0
        slot.parameter.grad = None

    type(run.store)._count_pass = overwrite


@pytest.mark.parametrize(
    ("mutation", "told"),
    [
        (divide_by_micro_batches_too, "19 of 19 differ.*\n.*: 0.75"),
        (weigh_each_rank_for_itself, "19 of 19 differ"),
        (forget_the_first_micro_batch, "19 of 19 differ"),
    ],
)
def test_a_mutation_is_caught(ranks, own, small, mutation, told):
    tables = small(batch={"global_size": 8, "micro_size": 1})
    layouts = ranks(2)(record, tables, 2, folder=own, prepare=mutation)
    with pytest.raises(AssertionError, match=told):
        assert_parity(record_reference(tables, 2, folder=own), layouts, "fp64")

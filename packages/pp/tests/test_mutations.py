"""Tests that the comparison of runs catches deliberate mistakes in stages, ties and replicas.

Every mutation changes the run of each rank before its first step. The plan has two stages, two replicas and tied ends.
"""

from __future__ import annotations

import pytest

from sley_testing.runs import assert_parity_of_parts, record

TIE = "embed.weight"
GAIN = "blocks.0.gain"


def make_no_mutation(run):
    """Makes no mutation, to show that the mutations cause the errors."""


def drop_the_sum_of_the_tie(run):
    """Leaves each stage with its copy's gradient."""
    run.stepper.handlers[1].finish_step = lambda step: None


def drop_a_reduction(run):
    """Does not sum one parameter of the first stage over its replicas."""
    reducer = run.stepper.handlers[0]
    ready = reducer.gradient_ready
    reducer.gradient_ready = lambda param, step: None if param.name == GAIN else ready(param, step)


def sum_the_tie_over_the_replicas(run):
    """Uses the group of the other axis, which has as many ranks."""
    handler = run.stepper.handlers[1]
    handler._groups = _Swapped(run.groups, "tie[0,1]", "stage")


def reduce_the_tie_over_the_stages(run):
    """Does not sum the tie over its replicas, and sums it twice over its stages."""
    run.registry[TIE].reduce_group = "tie[0,1]"


class _Swapped:
    def __init__(self, groups, asked, given):
        self.groups = groups
        self.asked = asked
        self.given = given

    def __getitem__(self, axis):
        return self.groups[self.given if axis == self.asked else axis]


def count_the_tie_twice_in_the_norm(run):
    """Makes both stages count the tie in full."""
    for buffer in run.store.buffers:
        buffer.stages = buffer.stages[:1]


def sum_the_tie_twice(run):
    finish = run.stepper.handlers[1].finish_step

    def twice(step):
        finish(step)
        finish(step)

    run.stepper.handlers[1].finish_step = twice


def forget_one_weight_gradient(run):
    """Drops the queue of the first microbatch on the first stage."""
    queue = run.stepper.executor.queue
    work = queue.run

    def forgetful(place):
        if run.groups["pp"].coord == 0 and place[1] == 0:
            queue._queued.pop(place)
            return
        work(place)

    queue.run = forgetful


def divide_by_the_micro_batches_too(run):
    """Uses the scale of a loss that is already a mean."""
    weigh = run.stepper._global_weight
    run.stepper._global_weight = lambda: weigh() * run.store.state.num_micros


def start_with_another_copy(run):
    """Changes the last bit of one element of the second stage's copy, without a comparison."""
    run.stepper.compare = None
    if run.groups["pp"].coord == 1:
        value = run.registry[TIE].parameter.data.view(-1)
        value[0] = value[0].nextafter(value[0] + 1)


CAUGHT = [
    (drop_the_sum_of_the_tie, rf"1 of 11 differ.*\n  {TIE}"),
    (drop_a_reduction, rf"1 of 11 differ.*\n  {GAIN}"),
    (sum_the_tie_over_the_replicas, rf"1 of 11 differ.*\n  {TIE}"),
    (reduce_the_tie_over_the_stages, rf"1 of 11 differ.*\n  {TIE}"),
    (count_the_tie_twice_in_the_norm, "grad_norm"),
    (sum_the_tie_twice, rf"1 of 11 differ.*\n  {TIE}.*: 1\b"),
    (forget_one_weight_gradient, r"4 of 11 differ.*\n  blocks\.[01]\.(one|two)\.weight"),
    (divide_by_the_micro_batches_too, "11 of 11 differ.*\n.*: 0.5"),
    (start_with_another_copy, rf"1 of .* differ\n  {TIE}"),
]


def run_with_each_mutation(tables, folder):
    """Returns the results of one step without a mutation, and one with each."""
    return [record(tables, 1, folder=folder, prepare=mutate) for mutate in (make_no_mutation, *(one for one, _ in CAUGHT))]


def test_each_mutation_is_caught(ranks, small, own):
    model = {"factory": "pp_parts:tied", "options": {"ends": True}}
    changes = {"model": model, "optimizer": {"use": "core.sgd", "lr": 0.1}}
    reference = record(small(**changes), 1, folder=own)
    plain, *mutated = zip(*ranks(4)(run_with_each_mutation, small("pp.zero_bubble_h1", 2, 2, **changes), own), strict=True)
    assert_parity_of_parts(reference, plain, "fp64")
    for (_, told), layouts in zip(CAUGHT, mutated, strict=True):
        with pytest.raises(AssertionError, match=told):
            assert_parity_of_parts(reference, layouts, "fp64")

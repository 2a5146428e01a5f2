"""Tests that a parameter of several stages stays one parameter."""

from collections import Counter

import pytest
import torch

from sley_core.comm.world import World
from sley_core.errors import PlanError
from sley_core.plan.load import plan_from_dict
from sley_testing.collectives import collectives
from sley_testing.runs import running
from sley_trainer.assemble import assemble

BY_STAGE = {"use": "pp.explicit", "layers": [2, 1, 1, 2]}
"""Four blocks on four stages, the embedding and the head at the ends."""

TIES = {
    "the ends, three-way, and pairs": {"ends": True, "ties": [["one", [0, 1, 3]], ["two.weight", [1, 3]], ["gain", [0, 3]]]},
    "a copy that may have no gradient": {"ties": [["one", [1, 2]], ["two", [1, 2]]], "sometimes": [2]},
    "the ends and two more": {"ends": True, "ties": [["one", [1, 2]], ["gain", [0, 3]]]},
    "one matrix without its bias": {"ties": [["one.weight", [0, 2]]]},
}


def even_then_odd():
    """Returns two batches of tokens: all even, so that every copy is used, and all odd."""
    tokens = torch.randint(0, 8, (2, 8, 7), generator=torch.Generator().manual_seed(0)) * 2 + torch.arange(2)[:, None, None]
    return [{"tokens": step[:, :-1].contiguous(), "labels": step[:, 1:].contiguous()} for step in tokens]


def assert_equal_bits(values, layouts):
    """Asserts that all ranks have the same bits of each value. values: of a layout, by name."""
    known = {}
    for layout in layouts:
        for name, value in values(layout).items():
            assert torch.equal(known.setdefault(name, value), value), name


@pytest.mark.parametrize(
    ("pp", "dp", "schedule", "num_ties"),
    [(2, 2, "pp.zero_bubble_h1", 2), pytest.param(4, 1, "pp.one_f_one_b", len(TIES), marks=pytest.mark.campaign)],
)
def test_copies_have_equal_bits(compare_with_one_process, small, pp, dp, schedule, num_ties):
    """Gradients and weights of all copies are equal bit for bit, and the norm counts them once.

    In the second step no microbatch uses one copy. Its gradient counts as zero, and no rank waits.
    """
    changes = {"partition": BY_STAGE if pp == 4 else {"use": "pp.uniform"}}
    models = [{"factory": "pp_parts:tied", "options": options} for options in list(TIES.values())[:num_ties]]
    plans = [small(schedule, pp, dp, model=model, **changes) for model in models]
    for layouts in compare_with_one_process(pp * dp, plans, batches=even_then_odd()):
        for step in range(2):
            assert_equal_bits(lambda layout, at=step: layout.gradients[at], layouts)
        assert_equal_bits(lambda layout: layout.weights, layouts)


MANY = {"ends": True, "ties": [["gain", [0, 3]], ["one", [1, 2]], ["two", [1, 2]]]}


def sums_of_ties(tables, folder):
    """Returns the groups of the all-reduces over ties in the second step, and the number of ties of each group."""
    with running(tables, folder) as run:
        run.step()
        with collectives() as calls:
            run.step()
        groups = [param.tie_axis for param in run.registry if param.tie_axis is not None]
        ties = [call.group.partition("][")[0] + "]" for call in calls if call.group.startswith("tie")]
        return ties, Counter(groups)


def test_ties_of_the_same_stages_share_an_all_reduce(ranks, small, own):
    tables = small("pp.one_f_one_b", 4, model={"factory": "pp_parts:tied", "options": MANY}, partition=BY_STAGE)
    for calls, groups in ranks(4)(sums_of_ties, tables, own):
        assert calls == sorted(groups), "one for each group, in one order"
        assert all(number > 1 for number in groups.values())


def test_a_tie_within_a_rank_has_no_collective(ranks, small, own):
    """A V ends on the rank on which it starts."""
    model = {"factory": "pp_parts:tied", "options": {"ends": True}}
    assert ranks(2)(sums_of_ties, small("pp.zero_bubble_v", 2, model=model), own) == [([], Counter())] * 2


def test_copies_cannot_have_other_options(small, own):
    """A tie has only its first name on every stage."""
    model = {"factory": "pp_parts:tied", "options": {"ends": True}}
    tables = small("pp.gpipe", 2, model=model, optimizer__groups=[{"match": "head.weight", "lr": 0.5}])
    with World.fake(0, 2) as world, pytest.raises(PlanError) as caught:
        assemble(plan_from_dict(tables, own), world)
    (problem,) = caught.value.diagnostics
    assert problem.code == "group-unmatched"
    assert "`head.weight`, but groups must use the first name of this weight, `embed.weight`" in problem.message

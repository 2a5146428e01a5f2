"""Any model given as layers trains sharded as it does whole."""

from __future__ import annotations

import pytest

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.engine.shards import REDUCE_GROUP
from sley_core.plan.load import plan_from_dict
from sley_testing.runs import record


@pytest.fixture
def foreign(own):
    """`foreign("isp_parts:mixed", **options)`: the changes that make the small plan train a model of its own."""

    def foreign(model, **options):
        return {
            "model": {"factory": model, "options": options},
            "data": {"factory": "isp_parts:Points"},
            "loss": {"factory": "isp_parts:Squares"},
        }

    return foreign


@pytest.mark.parametrize("unit", ["layer", "module"])
def test_linears_of_all_sizes_with_attention_of_their_own(parity, foreign, unit):
    """No two of one size, some without bias, one used twice, so that its gradients are summed."""
    parity(2, wp=2, weights={"unit": unit}, **foreign("isp_parts:mixed"))


@pytest.mark.parametrize("unit", ["layer", pytest.param("module", marks=pytest.mark.campaign)])
def test_the_order_of_registration_means_nothing(parity, foreign, unit):
    """The order of gathers is that of use: modules registered in another order train alike."""
    parity(2, wp=2, weights={"unit": unit}, **foreign("isp_parts:mixed", turned=True))


@pytest.mark.parametrize(
    ("unit", "reentrant"),
    [
        ("layer", True),
        pytest.param("module", False, marks=pytest.mark.campaign),
        pytest.param("layer", False, marks=pytest.mark.campaign),
        pytest.param("module", True, marks=pytest.mark.campaign),
    ],
)
def test_a_model_that_recomputes_by_itself(parity, foreign, reentrant, unit):
    """With either of torch's checkpoints, reentrant or not."""
    parity(2, wp=2, weights={"unit": unit}, **foreign("isp_parts:recomputing", reentrant=reentrant))


@pytest.mark.parametrize("name", ["adapted", "frozen_start", "padded_tokens"])
def test_partly_frozen(parity, foreign, name):
    """Adapters, trained biases of frozen weights, a frozen start; the row of a padding token."""
    parity(2, wp=2, **foreign(f"isp_parts:{name}"))


def test_autocast(ranks, sharded, texts, foreign):
    """With and without bias; sharded and whole runs round alike but for the order of sums."""
    changes = foreign("isp_parts:autocast") | {"precision__compute": "fp32"}
    reference = record(sharded(1, 1, **changes), 2, folder=texts)
    for found in ranks(2)(record, sharded(2, **changes), 2, folder=texts):
        assert found.rows[1]["loss"] == pytest.approx(reference.rows[1]["loss"], rel=2**-7)
        for name, gradient in reference.gradients[0].items():
            assert (found.gradients[0][name] - gradient).norm() <= 2**-7 * gradient.norm() + 1e-6, name


def test_what_other_code_holds_stays_whole(parity, foreign):
    """A parameter that a module of another kind holds too is not sharded, whoever else holds it."""
    parity(2, wp=2, **foreign("isp_parts:tied_to_no_linear"))


def shards(tables, folder):
    """Of each parameter, over which group its gradient is partial, and the shape that this rank holds."""
    from sley_core.assemble import assemble
    from sley_core.comm.world import World
    from sley_core.plan.load import plan_from_dict

    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        found = {param.name: (param.reduce_group, tuple(param.parameter.shape)) for param in run.registry}
        return found, run.registry.num_parameters, run.memory.bytes["weights"]


def test_a_rank_holds_its_rows_only(ranks, sharded, texts, foreign):
    """13 x 4 numbers of a table of 11 rows are 6 rows each, one of them padding; norms stay whole."""
    first, second = ranks(2)(shards, sharded(2, **foreign("isp_parts:mixed")), texts)
    assert first[0] == second[0]
    assert first[0]["embed.table.weight"] == (REDUCE_GROUP, (6, 6))
    assert first[0]["block0.up.weight"] == (REDUCE_GROUP, (4, 6))
    assert first[0]["block1.up.bias"] == (REDUCE_GROUP, (6,))
    assert first[0]["block0.norm.weight"] == ("stage", (6,))
    (whole,) = ranks(1)(shards, sharded(1, **foreign("isp_parts:mixed")), texts)
    replicated = 4 * 2 * 6
    assert first[1] + second[1] - replicated == whole[1], "padding counts for nobody"
    assert first[2] < 0.6 * whole[2]


@pytest.mark.parametrize(
    ("model", "note"),
    [
        ("isp_readers:stacked", ["`wp` shards 47 % of this model's parameters; not sharded: blocks.* (Stacked, 2)"]),
        ("isp_parts:experts", []),
    ],
)
def test_what_stays_whole_is_said(sharded, own, foreign, model, note):
    """By `check --model` too, which assembles in a fake world."""
    options = {} if model.endswith("stacked") else {"number": 8}
    plan = plan_from_dict(sharded(2, **foreign(model, **options)), own)
    with World.fake(0, 2) as world, assemble(plan, world) as run:
        assert run.notes == note

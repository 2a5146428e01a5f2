"""What the plugin says before a run: its records, without torch; options and models that it refuses."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import PlanError
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict

SPLIT = {"sequence": {"use": "isp.all_to_all"}}
LABELLED = {"data": {"factory": "isp_models:Labelled"}}


def test_records_are_listed_without_torch():
    """Core and this package are enough: no sibling is imported."""
    code = (
        "import sys\n"
        "from sley_core.plan.loader import Loader\n"
        "found = Loader().load('isp').records\n"
        "print([*found['weight_communicators'], *found['sequence_attentions']])\n"
        "import sley_isp.prefetch\n"
        "print([name for name in sys.modules if name.startswith(('torch', 'sley_pp', 'sley_dp', 'sley_memory'))])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["['communicator', 'all_to_all']", "[]"]


@pytest.mark.parametrize(
    ("weights", "changes", "codes"),
    [
        ({"head": "vocabulary"}, {}, []),
        ({"head": "vocabulary"}, {"loss": {"factory": "isp_models:Squares"}}, ["head-loss"]),
        ({"unit": "module"}, {}, []),
        ({"unit": "module", "launch": "attention"}, {}, ["launch-unit"]),
        ({}, {"parallel": {"reduction": "canonical"}}, []),
        ({"reduce": "step", "head": "vocabulary"}, {"parallel": {"reduction": "canonical"}}, ["canonical-unsupported"] * 2),
        ({}, SPLIT | {"parallel": {"sp": 2}, "model__hidden": 24, "model__heads": 6}, []),
        ({}, SPLIT | {"parallel": {"sp": 4}, "model__hidden": 24, "model__heads": 6}, ["sequence-heads"]),
    ],
)
def test_options_that_do_not_fit(sharded, texts, weights, changes, codes):
    plan = plan_from_dict(sharded(2, weights=weights, **changes), texts)
    assert [problem.code for problem in check_plan(plan, plan.world())] == codes


@pytest.mark.parametrize(
    ("weights", "changes", "code"),
    [
        ({"launch": "atention.outputt"}, {}, "launch-point"),
        ({"head": "vocabulary"}, LABELLED | {"model": {"factory": "isp_models:two_linears"}}, "head-vocabulary"),
        ({"head": "vocabulary"}, LABELLED | {"model": {"factory": "isp_models:head_held_elsewhere"}}, "head-vocabulary"),
        ({"embedding": "hidden"}, {"model__tie_embeddings": True}, "embedding-hidden"),
        ({"embedding": "hidden"}, {"factory": "tied_to_no_linear"}, "embedding-hidden"),
        ({"embedding": "hidden"}, {"factory": "limited"}, "embedding-hidden"),
    ],
)
def test_models_that_do_not_fit(sharded, texts, weights, changes, code):
    """Found on meta, on every rank of any stage: by `check --model`, before any process starts."""
    plan = plan_from_dict(sharded(2, weights=weights, **changes), texts)
    with World.fake(0, 2) as world, pytest.raises(PlanError) as caught, assemble(plan, world):
        pass
    assert [problem.code for problem in caught.value.diagnostics] == [code]


def test_what_stays_whole_is_named(sharded, texts):
    for factory, options, note in (
        ("stacked", {}, ["`wp` shards 47 % of this model's parameters; not sharded: blocks.* (Stacked, 2)"]),
        ("experts", {"number": 8}, []),
    ):
        plan = plan_from_dict(sharded(2, factory=factory, options=options), texts)
        with World.fake(0, 2) as world, assemble(plan, world) as run:
            assert run.notes == note


def test_shards_on_meta(sharded, texts):
    """A table of five columns over two ranks has three on each, the rest of the model is cut by rows; norms stay whole."""
    plan = plan_from_dict(sharded(2, weights={"embedding": "hidden"}, factory="tables"), texts)
    with World.fake(1, 2) as world, assemble(plan, world) as run:
        param = run.registry["embed.tokens.weight"]
        assert (param.shape, param.parameter.shape, param.shard.padding) == ((11, 5), (11, 3), 11)
        assert run.registry["head.weight"].parameter.shape == (3, 5)
        assert run.registry["norm.weight"].shard is None

"""Tests the contracts of `isp`, its checks of plans and models, and runs on CUDA."""

from typing import Any, ClassVar

import pytest
import torch

from sley_core.comm.world import World
from sley_core.errors import PlanError
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict
from sley_testing.attention_contract import SequenceAttentionContract
from sley_testing.contract import SQUARES
from sley_testing.plans import changed, small_plan
from sley_testing.runs import assert_equal_replicas, assert_parity, record, running
from sley_testing.weight_contract import WeightCommunicatorContract
from sley_trainer.assemble import assemble

SPLIT = {"sequence": {"use": "isp.all_to_all"}}
LABELLED = {"data": {"factory": "isp_models:Labelled"}}


@pytest.mark.parametrize(
    ("weights", "changes", "codes"),
    [
        ({"head": "vocabulary"}, {}, []),
        ({"head": "vocabulary"}, {"loss": SQUARES}, ["head-loss"]),
        ({"unit": "module"}, {}, []),
        ({"gather_precision": "fp8"}, {"parallel": {"reduction": "canonical"}}, ["canonical-unsupported"]),
        ({"groups": [{"match": "*", "reduce": "step"}]}, {"parallel": {"reduction": "canonical"}}, ["canonical-unsupported"]),
        ({}, {"parallel": {"reduction": "canonical"}}, []),
        ({"reduce": "step", "head": "vocabulary"}, {"parallel": {"reduction": "canonical"}}, ["canonical-unsupported"] * 2),
        ({}, SPLIT | {"parallel": {"sp": 2}, "model__hidden": 24, "model__heads": 6}, []),
        ({}, SPLIT | {"parallel": {"sp": 4}, "model__hidden": 24, "model__heads": 6}, ["sequence-heads"]),
    ],
)
def test_unsupported_options_are_refused(sharded, texts, weights, changes, codes):
    plan = plan_from_dict(sharded(2, weights=weights, **changes), texts)
    assert [problem.code for problem in check_plan(plan, plan.world_size())] == codes


@pytest.mark.parametrize(
    ("weights", "changes", "code"),
    [
        ({"launch": "atention.outputt"}, {}, "launch-point"),
        ({"groups": [{"match": "blocks.*"}, {"match": "blocks.0.*"}]}, {}, "group-unmatched"),
        ({"head": "vocabulary"}, LABELLED | {"model": {"factory": "isp_models:two_linears"}}, "head-chunks"),
        ({"head": "vocabulary"}, LABELLED | {"model": {"factory": "isp_models:shared_head"}}, "head-vocabulary"),
        ({"embedding": "hidden"}, {"model__tie_embeddings": True}, "embedding-hidden"),
        ({"embedding": "hidden"}, {"factory": "tied_to_no_linear"}, "embedding-hidden"),
        ({"embedding": "hidden"}, {"factory": "limited"}, "embedding-hidden"),
    ],
)
def test_unsupported_models_are_refused(sharded, texts, weights, changes, code):
    """`check --model` refuses them on meta for every rank, before any process starts."""
    plan = plan_from_dict(sharded(2, weights=weights, **changes), texts)
    with World.fake(0, 2) as world, pytest.raises(PlanError) as caught, assemble(plan, world):
        pass
    assert [problem.code for problem in caught.value.diagnostics] == [code]


# -- contracts ---------------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
class TestByLayer(WeightCommunicatorContract):
    weights: ClassVar[dict[str, Any]] = {"use": "isp.communicator"}


@pytest.mark.campaign  # test_plain_loop.py and test_unshard.py compare these options with other runs
class TestByModuleAndOncePerStep(WeightCommunicatorContract):
    weights: ClassVar[dict[str, Any]] = {"use": "isp.communicator", "unit": "module", "ahead": 2, "reduce": "step"}


@pytest.mark.campaign  # test_plain_loop.py compares a run that gathers rounded weights
class TestRoundedWeights(WeightCommunicatorContract):
    weights: ClassVar[dict[str, Any]] = {"use": "isp.communicator", "gather_precision": "fp8"}


class TestAllToAll(SequenceAttentionContract):
    sequence: ClassVar[dict[str, Any]] = {"use": "isp.all_to_all"}


# -- on CUDA: the numbers of the CPU, and nothing in a step that waits for the device ----------------------------------


TEXT = {"use": "data.text", "source": "python-stdlib", "sequence": 64, "documents": "pack"}
ON_CUDA = small_plan(run__device="cuda", model__hidden=64, model__ffn_hidden=None, data=TEXT)


def on_cuda(**weights: Any) -> dict[str, Any]:
    return changed(ON_CUDA, parallel={"dp": 2, "wp": 2}, weights={"use": "isp.communicator", **weights})


@pytest.mark.parametrize(
    "weights",
    [
        *(pytest.param(options, marks=pytest.mark.gpu) for options in ({}, {"head": "vocabulary"}, {"embedding": "hidden"})),
        *(pytest.param(options, marks=pytest.mark.gpu(2)) for options in ({"unit": "module"}, {"overlap": False})),
    ],
)
def test_two_ranks_equal_one(ranks, weights):
    """Ranks use two devices, or share one."""
    reference = record(ON_CUDA, 3)
    layouts = ranks(2, timeout_s=180, init=False)(record, on_cuda(**weights), 3)
    assert_parity(reference, layouts, "fp64")
    assert_equal_replicas(layouts)


def run_without_synchronisation(tables: dict[str, Any]) -> bool:
    """Runs a step while CUDA raises an error at any synchronisation."""
    with running(tables) as run:
        for _ in range(2):
            run.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            launched = run.launch(None)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return launched.totals.read().is_finite


@pytest.mark.gpu(2)
@pytest.mark.parametrize(
    ("weights", "is_compiled"), [({}, False), ({}, True), ({"unit": "module"}, False), ({"reduce": "step"}, False)]
)
def test_a_step_never_waits_for_the_device(ranks, weights, is_compiled):
    """Vocabulary heads and embeddings by columns are excluded, since their ranks exchange numbers of tokens."""
    tables = changed(on_cuda(**weights), model__compile=is_compiled)
    assert ranks(2, timeout_s=180, init=False)(run_without_synchronisation, tables) == [True, True]

"""Tests records and checks of plans, and the contract of gradient handlers."""

from typing import ClassVar

import pytest

from sley_core.comm.world import World
from sley_core.errors import PlanError
from sley_core.plan.check import check_plan
from sley_core.plan.load import plan_from_dict
from sley_dp.plugin import BF16_TOLERANCE, sley_estimate_hints
from sley_testing.contract import GradientHandlerContract
from sley_testing.plans import small_plan
from sley_trainer.assemble import assemble

HANDLERS = [{"use": "dp.bucketed"}, {"use": "dp.bucketed", "reduction": "bf16"}, {"use": "dp.sharded"}]
SHARDED = {"use": "dp.sharded"}
MUON = {"factory": "torch.optim:Muon", "lr": 0.1}
ADAMW = {"factory": "their.own:AdamW", "lr": 0.1}


@pytest.mark.sample(1)
class TestBucketed(GradientHandlerContract):
    handler: ClassVar[dict] = {"use": "dp.bucketed"}


@pytest.mark.campaign  # other tests train with it
class TestBf16(GradientHandlerContract):
    handler: ClassVar[dict] = {"use": "dp.bucketed", "bucket_mb": 1e-5, "reduction": "bf16"}


@pytest.mark.sample(1)
class TestSharded(GradientHandlerContract):
    handler: ClassVar[dict] = {"use": "dp.sharded", "bucket_mb": 1e-5}


def test_plans_name_their_reducer_and_its_tolerance(small):
    for handler, tolerance in zip(HANDLERS, (0.0, BF16_TOLERANCE, 0.0), strict=True):
        plan = plan_from_dict(small(handler))
        assert check_plan(plan, 2) == []
        (component,) = plan.gradient_handlers
        assert component.record.tolerance_for(component.config) == tolerance
    default = plan_from_dict(small(gradient_handlers=None, parallel={"dp": 2}))
    assert [handler.name for handler in default.gradient_handlers] == ["core.each"], "an installed package changes no plan"
    assert set(sley_estimate_hints()) == {"dp.bucketed", "dp.sharded"}, "a search tries both"


@pytest.mark.parametrize(
    ("handler", "changes", "world", "codes"),
    [
        ({}, {"optimizer": MUON}, 2, []),
        ({}, {"optimizer": ADAMW}, 2, ["optimizer-layout"]),
        ({}, {"optimizer": ADAMW | {"scope": "elementwise"}}, 2, []),
        ({"shards": 3}, {}, 4, ["shards-do-not-divide"]),
        ({"shards": 2}, {}, 4, []),
        ({"shards": 2}, {}, 1, []),
        ({"shards": 2}, {"parallel": {"reduction": "canonical"}}, 4, ["canonical-unsupported"]),
    ],
)
def test_unsupported_optimizers_and_shards_are_refused(small, own, handler, changes, world, codes):
    plan = plan_from_dict(small(SHARDED | handler, batch__global_size=8, **changes), own)
    assert [problem.code for problem in check_plan(plan, world)] == codes


def test_a_parameter_of_another_dtype_is_refused_in_a_sharded_buffer(texts):
    precision = {"compute": "bf16", "keep": ["*norm*"]}
    tables = small_plan(precision=precision, gradient_handlers=[SHARDED], parallel={"dp": 2})
    with pytest.raises(PlanError) as caught, World.fake(0, 2) as world:
        assemble(plan_from_dict(tables, texts), world)
    assert [problem.code for problem in caught.value.diagnostics] == ["precision-keep"]


@pytest.mark.parametrize("handler", [*HANDLERS, SHARDED | {"shards": 4}])
def test_every_rank_of_a_large_world_assembles_without_memory(small, own, handler):
    tables = small(handler | {"bucket_mb": 0.001}, model__factory="dp_parts:odd", batch__global_size=64)
    layouts = set()
    for rank in (0, 31, 63):
        with World.fake(rank, 64) as world, assemble(plan_from_dict(tables, own), world) as run:
            assert all(buffer.data.is_meta for buffer in (*run.store.buffers, *run.parts.weights.buffers))
            layouts.add(str([buffer.params for buffer in run.store.buffers]))
            if "shards" in handler:
                assert run.groups["dp.shards.stage"].ranks == tuple(range(rank // 4 * 4, rank // 4 * 4 + 4))
                assert run.groups["dp.copies.stage"].ranks == tuple(range(rank % 4, 64, 4))
    assert len(layouts) == 1, "all ranks have the same buckets"

"""Weights that are laid side by side have one format, so parameters that stay in fp32 are refused by name."""

from __future__ import annotations

import pytest

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import PlanError
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import small_plan


def test_parts_of_weights_and_a_parameter_in_fp32(texts):
    handler = {"use": "dp.sharded", "bucket_mb": 0.001}
    tables = small_plan(precision={"compute": "bf16", "keep": ["*norm*"]}, gradient_handlers=[handler], parallel={"dp": 2})
    with pytest.raises(PlanError) as caught, World.fake(0, 2) as world:
        assemble(plan_from_dict(tables, texts), world)
    (one,) = caught.value.diagnostics
    assert (one.code, one.path) == ("precision-keep", ("precision", "keep"))
    assert one.message == "`dp.sharded` lays all weights side by side in one format"

"""Tensors in reference cycles: counted alike whenever Python's collector would come, and told."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from sley_core.plan.load import plan_from_dict
from sley_estimate.bytes.rank import rank_bytes
from sley_testing.plans import changed, small_plan

PLAN = small_plan(
    model={"factory": "cyclic_layers:layers"}, batch={"global_size": 8, "micro_size": 2}, precision={"compute": "fp32"}
)


@pytest.fixture(params=["off", "always"])
def collector(request: pytest.FixtureRequest) -> Iterator[None]:
    was_on, thresholds = gc.isenabled(), gc.get_threshold()
    gc.disable()
    if request.param == "always":
        gc.enable()
        gc.set_threshold(1, 1, 1)
    yield
    assert gc.isenabled() is (request.param == "always")
    gc.set_threshold(*thresholds)
    (gc.enable if was_on else gc.disable)()


@pytest.mark.usefixtures("collector")
def test_what_a_step_leaves_in_cycles_is_counted_and_told(texts, own_layers):
    plan = plan_from_dict(PLAN, own_layers)
    found = rank_bytes(plan, 0, 1)
    left = found.num_micros * plan.batch.micro_size * plan.data.config.sequence * 8 * 4  # fp32, of each micro-batch
    assert found.cycles is not None
    assert (found.cycles.num_bytes, found.cycles.layer) == (left, "keeps")
    assert found.alive["activations"] >= left


def test_a_model_without_cycles_has_nothing_to_tell(texts):
    plan = plan_from_dict(changed(small_plan(), activations={"use": "core.recompute"}), texts)
    assert rank_bytes(plan, 0, 1).cycles is None

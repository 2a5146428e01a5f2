"""Weights that are loaded between two steps are there in every layout, and the step after is one process's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.engine.registry import ParameterRegistry
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import changed, small_plan
from sley_testing.runs import weights

PLAN = small_plan(
    model__tie_embeddings=True,
    data__sequence=16,
    batch={"global_size": 4, "micro_size": 1},
    optimizer={"use": "core.sgd", "lr": 1e-6},
)
LAYOUTS: list[dict[str, Any]] = [
    {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "dp.bucketed"}]},
    {"parallel": {"pp": 2}, "pipeline": {"use": "pp.one_f_one_b"}},
    {"parallel": {"wp": 2}, "weights": {"use": "isp.communicator"}},
]


def loaded(plans: list[dict[str, Any]], texts: Path, state: dict[str, torch.Tensor]) -> list[Any]:
    """Of each plan the loss of the step after loading, and the weights after it."""
    found = []
    for tables in plans:
        with World.join("cpu") as world, assemble(plan_from_dict(tables, texts), world) as run:
            run.step()
            assert run.load_weights(state) == ([], [])
            found.append((run.step()["loss"], weights(run)))
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_loaded_weights_are_those_of_every_layout(ranks: Any, texts: Path, precision: str) -> None:
    base = changed(PLAN, precision__compute=precision)
    with assemble(plan_from_dict(base, texts), World.alone("cpu")) as run:
        generator = torch.Generator().manual_seed(2)
        state = {param.name: torch.randn(param.shape, generator=generator) * 0.1 for param in ParameterRegistry([run.layers])}
    ((loss, _),) = loaded([base], texts, state)
    near = 2**-7 if precision == "bf16" else 1e-5
    for of_rank in ranks(2)(loaded, [changed(base, **layout) for layout in LAYOUTS], texts, state):
        for their_loss, found in of_rank:
            assert their_loss == pytest.approx(loss, rel=near)
            for name in found.keys() & state.keys():
                torch.testing.assert_close(found[name].float(), state[name], rtol=near, atol=1e-4)

"""After a run that split sequences its model is a model of whole sequences again, in whatever way its attention was found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import changed, small_plan

OWN = Path(__file__).parent / "own"
PLAN = small_plan(
    run__steps=1,
    data={"use": "data.text", "source": "python-stdlib", "sequence": 16, "documents": "cut"},
    batch={"global_size": 2, "micro_size": 1},
    optimizer={"use": "core.sgd", "lr": 1e-2},
)
MODELS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "core's": ({"use": "models.llama", "num_layers": 1, "hidden": 16, "heads": 4, "ffn_hidden": 16}, []),
    "wrapped": ({"factory": "attentive:layers", "options": {"wrapped": True}}, []),
    "named": ({"factory": "attentive:layers"}, ["*.attend"]),
}


def called(tables: dict[str, Any], folder: Path) -> Tensor:
    """The output for whole sequences of the model of a run that has taken a step, and closed, and its world with it."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        run.step()
    hidden: Any = (torch.arange(32) % 11).view(2, 16)
    positions = torch.arange(16)[None].expand(2, 16)
    with torch.no_grad():
        for layer in run.layers:
            hidden = layer.module(hidden, **({"positions": positions} if "positions" in layer.fields else {}))
    return hidden


@pytest.mark.parametrize("found", MODELS)
def test_a_model_called_after_its_run(ranks, monkeypatch, found):
    monkeypatch.syspath_prepend(OWN)
    model, modules = MODELS[found]
    tables = changed(PLAN, model=model)
    split = {"parallel": {"dp": 1, "sp": 2}, "sequence": {"use": "isp.all_to_all", "modules": modules}}
    wanted = called(tables, OWN)
    for output in ranks(2, 40)(called, tables | split, OWN):
        torch.testing.assert_close(output, wanted, rtol=1e-10, atol=1e-10)

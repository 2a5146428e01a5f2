"""A run that is closed, or could not be assembled, leaves its model as the factory built it: ordinary modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_core.run import Run
from sley_testing.collectives import assert_untouched, drafts_kept

KEPT = "_compiled_call_impl"
DIRECT = {"compute": "fp64", "accumulation": "direct"}
PLANS: dict[str, dict[str, Any]] = {"recomputed": {"precision": DIRECT, "activations": {"use": "core.recompute"}}}


def output(run: Run) -> Tensor:
    hidden: Any = torch.arange(12)[None]
    with torch.no_grad():
        for layer in run.layers:
            hidden = layer.module(hidden)
    return hidden


@pytest.mark.parametrize("name", PLANS)
def test_a_closed_run(small, own, name):
    """And the model computes what it did in the run."""
    plan = plan_from_dict(small(evaluation={"every": 9, "steps": 1}, **PLANS[name]), own)
    with drafts_kept() as kept, assemble(plan, World.alone("cpu")) as run:
        run.step()
        run.evaluate()
        before = output(run)
    ((model, traces),) = kept
    assert_untouched(traces, model.layers)
    run.close()
    assert output(run).equal(before)
    run.layers[-1].module(torch.ones(1, 8, dtype=before.dtype)).sum().backward()
    assert run.registry["head.weight"].parameter.grad is not None, "autograd's, as of any module"


def compiled(module: nn.Module) -> None:
    """What `nn.Module.compile` does, without a compiler."""
    vars(module)[KEPT] = module._call_impl


def test_a_compiled_run(small, own, monkeypatch):
    """Calls of a layer go through the compiler no more."""
    monkeypatch.setattr(nn.Module, "compile", compiled)
    tables = small()
    tables["model"]["compile"] = True
    with drafts_kept() as kept, assemble(plan_from_dict(tables, own), World.alone("cpu")) as run:
        assert all(KEPT in vars(layer.module) for layer in run.layers)
        run.step()
    ((model, traces),) = kept
    assert_untouched(traces, model.layers)


@pytest.mark.parametrize("at", ["sley_core.attach.Stepper", "sley_core.assemble.samples_of", "sley_core.assemble.Run"])
def test_an_assembly_that_fails(small, own, monkeypatch, at):
    """However late."""

    def fail(*args: Any, **more: Any) -> None:
        raise ValueError("asked to")

    monkeypatch.setattr(at, fail)
    plan = plan_from_dict(small(precision=DIRECT), own)
    with drafts_kept() as kept, pytest.raises(ValueError, match="asked to"):
        assemble(plan, World.alone("cpu"))
    ((model, traces),) = kept
    assert_untouched(traces, model.layers)

"""A run that is closed, or could not be assembled, leaves its model as the factory built it: ordinary modules."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.engine.call import compile_layers
from sley_core.errors import RunError
from sley_core.model.layers import Layer
from sley_core.plan.load import plan_from_dict
from sley_core.run import Run
from sley_testing.collectives import assert_untouched, drafts_kept

KEPT = "_compiled_call_impl"
DIRECT = {"compute": "fp64", "accumulation": "direct"}
PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "direct": {"precision": DIRECT},
    "recomputed": {"precision": DIRECT, "activations": {"use": "core.recompute"}},
    "masters": {"precision": {"compute": "bf16", "accumulation": "direct"}},
}


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


def test_a_run_that_was_only_looked_at(small, own):
    with World.fake(1, 2) as world, drafts_kept() as kept:
        assemble(plan_from_dict(small(precision=DIRECT, parallel={"dp": 2}), own), world).close()
    ((model, traces),) = kept
    assert_untouched(traces, model.layers)


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


def test_a_layer_that_its_factory_compiled_stays_so(monkeypatch):
    monkeypatch.setattr(nn.Module, "compile", compiled)
    with ExitStack() as undo:
        layer = Layer("one", nn.Linear(2, 2))
        of_the_factory = vars(layer.module)[KEPT] = lambda hidden: hidden
        compile_layers([layer], undo)
        assert vars(layer.module)[KEPT] is not of_the_factory
    assert vars(layer.module)[KEPT] is of_the_factory


def fails(module: nn.Module, args: Any) -> None:
    raise ValueError("asked to")


@pytest.mark.parametrize("place", ["blocks.0", "head"])
def test_a_failed_step(small, own, place):
    with drafts_kept() as kept, assemble(plan_from_dict(small(precision=DIRECT), own), World.alone("cpu")) as run:
        run.step()
        (layer,) = (one for one in run.layers if one.name == place)
        hook = layer.module.register_forward_pre_hook(fails)
        with pytest.raises(ValueError, match="asked to"):
            run.step()
        hook.remove()
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


def test_one_part_that_cannot_let_go_keeps_no_other(small, own):
    """Everything else is undone, and the error is told."""
    with drafts_kept() as kept:
        run = assemble(plan_from_dict(small(precision=DIRECT), own), World.alone("cpu"))
    run.step()
    run.stepper.undo.callback(fails, None, None)
    with pytest.raises(ValueError, match="asked to"):
        run.close()
    ((model, traces),) = kept
    assert_untouched(traces, model.layers)
    run.close()
    with pytest.raises(RunError, match="run-closed"):
        run.step()

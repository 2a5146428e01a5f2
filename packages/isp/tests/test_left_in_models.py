"""Tests that a closed run, or one that could not be assembled, restores the modules of its model.

Modules with sharded weights keep stand-ins, which refuse calls.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import RunError, SleyError
from sley_core.plan.load import plan_from_dict
from sley_core.run import Run
from sley_testing.collectives import assert_untouched, record_built_models

WAYS: list[dict[str, Any]] = [
    {},
    {"unit": "module", "reduce": "step"},
    {"launch": "attention"},
    {"head": "vocabulary", "embedding": "hidden"},
]
SPLIT: dict[str, Any] = {"dp": 1, "parallel": {"sp": 2}, "sequence": {"use": "isp.all_to_all"}}


def fail(*args: Any, **more: Any) -> None:
    raise ValueError("the test's failure")


def failed(run: Run) -> None:
    """Runs a step that fails in its backward on all ranks after a gather, so that no rank waits."""
    run.step()
    handle = run.layers[1].module.register_forward_hook(lambda module, args, result: [result.register_hook(fail)].clear())
    with pytest.raises(ValueError, match="the test's failure"):
        run.step()
    handle.remove()


def codes_after(plans: list[dict[str, Any]], folder: Path) -> set[str]:
    """Returns the error codes of calls of all layers after a run with a failed step."""
    codes = set()
    for tables in plans:
        with World.join("cpu") as world, record_built_models() as kept:
            with assemble(plan_from_dict(tables, folder), world) as run:
                failed(run)
            run.close()
            ((model, traces),) = kept
            assert_untouched(traces, model.layers)
            codes.update(code_of(layer.module) for layer in run.layers)
    return codes


def code_of(module: nn.Module) -> str:
    is_first = any(isinstance(part, nn.Embedding) for part in module.modules())
    x: Any = torch.zeros(1, 24, dtype=torch.int64) if is_first else torch.zeros(1, 24, 16, dtype=torch.float64)
    with pytest.raises(RunError) as caught, torch.no_grad():
        module(x, **({"positions": torch.arange(24)[None]} if hasattr(module, "attention") else {}))
    return caught.value.diagnostics[0].code


def test_a_closed_run(ranks, sharded, texts):
    """Also uses slices. The contract tests runs without failures."""
    plans = [sharded(2, weights=way) for way in WAYS] + [sharded(2, weights=WAYS[-1], **SPLIT)]
    assert ranks(2, 120)(codes_after, plans, texts) == [{"weights-sharded"}] * 2


def assembly_errors(plans: list[tuple[dict[str, Any], str]], folder: Path) -> list[str]:
    """Returns the error of each plan's assembly, which fails at the named function if there is one."""
    errors = []
    for tables, place in plans:
        with World.join("cpu") as world, record_built_models() as kept, pytest.MonkeyPatch.context() as patch:
            if place:
                patch.setattr(place, fail)
            with pytest.raises((SleyError, ValueError)) as caught:
                assemble(plan_from_dict(tables, folder), world)
            ((model, traces),) = kept
            assert_untouched(traces, model.layers)
            errors.append(caught.value.diagnostics[0].code if isinstance(caught.value, SleyError) else str(caught.value))
    return errors


def test_failed_assemblies(ranks, texts, sharded):
    """The patched attention, the communicator, its `attach` or a later function raises the error."""
    sequence = {"use": "isp.all_to_all", "modules": ["*.attention", "no"]}
    cases = [
        (sharded(1, 1, parallel={"sp": 2}, sequence=sequence), "", "sequence-attention"),
        (sharded(2, weights={"launch": "nowhere"}, **SPLIT), "", "launch-point"),
        (sharded(2, **SPLIT), "sley_core.assemble.build_samples", "the test's failure"),
    ]
    for place in ("communicator.StandIn.replace", "reduce_scatter.GradientReducer.register", "communicator.prefetch_points"):
        cases.append((sharded(2, weights=WAYS[-1]), f"sley_isp.{place}", "the test's failure"))
    errors = [error for _, _, error in cases]
    assert ranks(2, 120)(assembly_errors, [(tables, place) for tables, place, _ in cases], texts) == [errors, errors]

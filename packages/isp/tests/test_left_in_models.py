"""A run with sharded weights or slices that is closed, or could not be assembled, leaves modules as their factory built them.

Those whose weights are shards keep stand-ins of them, and say so when they are called.
"""

from __future__ import annotations

from collections.abc import Callable
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
from sley_testing.collectives import assert_untouched, drafts_kept

WAYS: dict[str, dict[str, Any]] = {
    "by layers": {},
    "by modules": {"unit": "module"},
    "launched": {"launch": "attention"},
    "classes and columns": {"head": "vocabulary", "embedding": "hidden"},
    "once per step": {"reduce": "step"},
}
SPLIT: dict[str, Any] = {"dp": 1, "parallel": {"sp": 2}, "sequence": {"use": "isp.all_to_all"}}


def finished(run: Run) -> None:
    run.step()
    run.evaluate()


def asked_to_fail(*args: Any, **more: Any) -> None:
    raise ValueError("asked to")


def failed(run: Run, hook: Callable[..., None]) -> None:
    """A step that fails on every rank at once, behind a gather, so that nobody waits for anybody."""
    run.step()
    handle = run.layers[1].module.register_forward_hook(hook)
    with pytest.raises(ValueError, match="asked to"):
        run.step()
    handle.remove()


def failed_forward(run: Run) -> None:
    failed(run, asked_to_fail)


def failed_backward(run: Run) -> None:
    failed(run, lambda module, args, result: [result.register_hook(asked_to_fail)].clear())


def left(plans: list[dict[str, Any]], folder: Path, use: Callable[[Run], None]) -> list[list[str]]:
    """What each layer says when it is called after a run that `use` used; it left nothing in its model."""
    found = []
    for tables in plans:
        with World.join("cpu") as world, drafts_kept() as kept:
            with assemble(plan_from_dict(tables, folder), world) as run:
                use(run)
            run.close()
            ((model, traces),) = kept
            assert_untouched(traces, model.layers)
            found.append([said(layer.module) for layer in run.layers])
    return found


def said(module: nn.Module) -> str:
    tokens = torch.zeros(1, 24, dtype=torch.int64)
    first: Any = (
        tokens
        if any(isinstance(part, nn.Embedding) for part in module.modules())
        else torch.zeros(1, 24, 16, dtype=torch.float64)
    )
    with pytest.raises(RunError, match="after its run was closed") as caught, torch.no_grad():
        module(first, **({"positions": torch.arange(24)[None]} if hasattr(module, "attention") else {}))
    return caught.value.diagnostics[0].code


@pytest.mark.sample(1)
@pytest.mark.parametrize("use", [finished, failed_forward, failed_backward])
def test_a_closed_run(ranks, texts, sharded, use):
    plans = [sharded(2, weights=WAYS[way]) for way in (WAYS if use is finished else list(WAYS)[2:])]
    if use is finished:
        plans.append(sharded(2, weights=WAYS["classes and columns"], **SPLIT))
    for found in ranks(2, 120)(left, plans, texts, use):
        assert all(code == "weights-sharded" for codes in found for code in codes)


@pytest.mark.campaign
def test_a_closed_run_of_slices(ranks, texts, sharded):
    for found in ranks(2, 120)(left, [sharded(2, weights=way, **SPLIT) for way in WAYS.values()], texts, finished):
        assert all(code == "weights-sharded" for codes in found for code in codes)


def refused(plans: list[tuple[dict[str, Any], str]], folder: Path) -> list[str]:
    """What the assembly of each plan says that fails, at the place named with it if there is one; it leaves nothing."""
    found = []
    for tables, place in plans:
        with World.join("cpu") as world, drafts_kept() as kept, pytest.MonkeyPatch.context() as patch:
            if place:
                patch.setattr(place, asked_to_fail)
            with pytest.raises((SleyError, ValueError)) as caught:
                assemble(plan_from_dict(tables, folder), world)
            ((model, traces),) = kept
            assert_untouched(traces, model.layers)
            found.append(caught.value.diagnostics[0].code if isinstance(caught.value, SleyError) else str(caught.value))
    return found


def test_an_assembly_that_fails(ranks, texts, sharded):
    """Refused by the attention that is patched already, by the communicator after it, within its `attach`, or later."""
    sequence = {"use": "isp.all_to_all", "modules": ["*.attention", "no"]}
    cases = [
        (sharded(1, 1, parallel={"sp": 2}, sequence=sequence), "", "sequence-attention"),
        (sharded(2, weights={"launch": "nowhere"}, **SPLIT), "", "launch-point"),
        (sharded(2, **SPLIT), "sley_core.assemble.samples_of", "asked to"),
    ]
    for place in ("communicator.stand_in", "reductions.GradientBuckets.add", "units.Launches.take"):
        cases.append((sharded(2, weights=WAYS["classes and columns"]), f"sley_isp.{place}", "asked to"))
    wanted = [said for _, _, said in cases]
    assert ranks(2, 120)(refused, [(tables, place) for tables, place, _ in cases], texts) == [wanted, wanted]

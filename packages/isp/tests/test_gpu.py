"""Sharded weights on CUDA: the numbers of the CPU, and nothing in a step that waits for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import changed, small_plan
from sley_testing.runs import assert_parity, record, same_on_all

TEXT = {"use": "data.text", "source": "python-stdlib", "sequence": 64, "documents": "pack"}
PLAN = small_plan(run__device="cuda", model__hidden=64, model__ffn_hidden=None, data=TEXT)


def split(**weights: Any) -> dict[str, Any]:
    return changed(PLAN, parallel={"dp": 2, "wp": 2}, weights={"use": "isp.communicator", **weights})


@pytest.mark.parametrize(
    "weights",
    [
        *(pytest.param(options, marks=pytest.mark.gpu) for options in ({}, {"head": "vocabulary"}, {"embedding": "hidden"})),
        *(pytest.param(options, marks=pytest.mark.gpu(2)) for options in ({"unit": "module"}, {"overlap": False})),
    ],
)
def test_two_ranks_equal_one(ranks, weights):
    """On two devices, or on one that they share."""
    reference = record(PLAN, 3)
    layouts = ranks(2, timeout_s=180, init=False)(record, split(**weights), 3)
    assert_parity(reference, layouts, "fp64")
    same_on_all(layouts)


def watched(tables: dict[str, Any]) -> bool:
    """Launches a step while CUDA's own watch raises at any synchronisation."""
    with World.join("cuda") as world, assemble(plan_from_dict(tables), world) as run:
        for _ in range(2):
            run.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            launched = run.launch(None)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return launched.totals.read().is_finite


@pytest.mark.gpu(2)
@pytest.mark.parametrize("weights", [{}, {"unit": "module"}, {"reduce": "step"}])
def test_a_step_never_waits_for_the_device(ranks, weights):
    """Not so with shared vocabularies and tables: there ranks tell each other how many tokens they have, and wait."""
    assert ranks(2, timeout_s=180, init=False)(watched, split(**weights)) == [True, True]

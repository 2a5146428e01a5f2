"""A row's seconds are its own step's, also where rows are read when the next step has been launched."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sley_core.assemble import assemble
from sley_core.comm.device import Device, Moment
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_core.run import Run
from sley_testing.plans import small_plan

STEP_S = 0.03


class Queued(Device):
    """A CPU whose rows are read late, as those of CUDA are; its work is done when it is launched."""

    @property
    def is_async(self) -> bool:
        return True

    def moment(self) -> Moment:
        return time.perf_counter()

    def fetch(self, tensor: Tensor) -> Tensor:
        return tensor.clone()


def sleep(module: Any, args: Any) -> None:
    time.sleep(STEP_S)


def slowed(run: Run) -> list[dict[str, Any]]:
    """Rows of a run each of whose steps takes `STEP_S` and a little."""
    rows: list[dict[str, Any]] = []
    run.listeners.append(rows.append)
    run.layers[0].module.register_forward_pre_hook(sleep)
    return rows


@pytest.mark.parametrize("device", [Device(torch.device("cpu")), Queued(torch.device("cpu"))], ids=["at once", "late"])
def test_each_row_has_the_seconds_of_its_step(texts: Path, device: Device) -> None:
    tables = small_plan(run={"name": "late", "steps": 6, "device": "cpu"}, batch={"global_size": 2, "micro_size": 2})
    with World.alone(device) as world, assemble(plan_from_dict(tables, texts), world) as run:
        rows = slowed(run)
        began = time.perf_counter()
        run.train()
        taken = time.perf_counter() - began
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["seconds"] >= STEP_S for row in rows), rows
    assert sum(row["seconds"] for row in rows) <= taken


@pytest.mark.parametrize("device", [Device(torch.device("cpu")), Queued(torch.device("cpu"))], ids=["at once", "late"])
def test_what_comes_between_steps_is_no_part_of_one(texts: Path, device: Device) -> None:
    """An evaluation in the middle, and a pause between two steps by hand."""
    tables = small_plan(run={"name": "late", "steps": 4, "device": "cpu"}, evaluation={"every": 2, "steps": 1})
    with World.alone(device) as world, assemble(plan_from_dict(tables, texts), world) as run:
        evaluate = run._mean_loss

        def slow(batch: object) -> float:
            time.sleep(1.0)
            return evaluate(None)

        run._mean_loss = slow  # type: ignore[method-assign]
        rows = slowed(run)
        run.step()
        time.sleep(1.0)
        run.train()
    assert all(row["seconds"] < 1.0 for row in rows), rows

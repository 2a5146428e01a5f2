"""The pool and the offload managers of `memory` hold their contracts; before a run they need neither torch nor memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.memory.state import PARTS, Where
from sley_core.plan.load import plan_from_dict
from sley_testing.offload_contract import OffloadManagerContract
from sley_testing.plans import changed, small_plan
from sley_testing.pool_contract import MemoryPoolContract


class TestSizeClasses(MemoryPoolContract):
    pool: ClassVar[dict[str, Any]] = {"use": "memory.size_classes"}


class TestEverything(OffloadManagerContract):
    """Tests of races draw many orders."""

    orders = 1
    offload: ClassVar[dict[str, Any]] = {"use": "memory.everything", "bucket_mb": 0.004}


class TestBetweenSteps(OffloadManagerContract):
    orders = 1
    offload: ClassVar[dict[str, Any]] = {"use": "memory.optimizer_states", "when": "between_steps", "bucket_mb": 0.01}


@pytest.mark.campaign  # they leave with everything, above
class TestGradients(OffloadManagerContract):
    orders = 1
    offload: ClassVar[dict[str, Any]] = {"use": "memory.gradients"}


# -- before a run ------------------------------------------------------------------------------------------------------


MANAGERS: dict[str, dict[str, Any]] = {
    "memory.everything": {},
    "memory.optimizer_states": {"when": "between_steps"},
    "memory.host_optimizer": {},
}


@pytest.mark.parametrize("manager", MANAGERS)
def test_a_run_with_a_manager_is_assembled_on_meta(texts: Path, manager: str) -> None:
    tables = small_plan(precision__compute="fp32", offload=[{"use": manager, **MANAGERS[manager]}])
    with World.fake(0, 1) as world, assemble(plan_from_dict(tables, texts), world) as run:
        masters = dict(run.memory.inventory.everything("masters"))
        assert all(tensor.device == torch.device("meta") for tensor in masters.values())
        assert bool(masters) == (manager == "memory.host_optimizer")
        run.memory.offload().wait()
        if manager != "memory.host_optimizer":  # whose masters and states are the host's
            assert run.memory.where == dict.fromkeys(PARTS, Where.HERE)
        run.memory.onload().wait()


@pytest.mark.parametrize("policy", ["memory.host", "memory.selective"])
def test_a_run_with_a_policy_is_assembled_on_meta(texts: Path, policy: str) -> None:
    tables = changed(small_plan(), activations={"use": policy})
    with World.fake(0, 1) as world, assemble(plan_from_dict(tables, texts), world) as run:
        assert all(one.parameter.is_meta for one in run.registry)

"""All who name a pool are given one object, with the options of the plan; it is made when it is first asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Annotated

import pytest
import torch
from torch import Tensor

from sley_core.errors import PlanError
from sley_core.hookspecs import hookimpl
from sley_core.memory.pool import Pools
from sley_core.plan.load import plan_from_dict
from sley_core.protocols import MemoryPool
from sley_core.records import MemoryPoolRecord, SchedulerHookRecord
from sley_core.table import Array, RecordReference, Table
from sley_testing.plans import loader_of, small_plan


class SizedConfig(Table):
    size: int = 8


class UserConfig(Table):
    pools: Array[Annotated[str, RecordReference("memory_pools")]] = ()


class Sized(MemoryPool):
    """Holds one tensor."""

    def __init__(self, config: SizedConfig) -> None:
        self.memory = torch.zeros(config.size)

    def lease(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> AbstractContextManager[Tensor]:
        raise NotImplementedError

    def trim(self) -> int:
        return 0

    def held(self) -> Iterator[tuple[str, Tensor]]:
        yield "all", self.memory

    def counts(self) -> Mapping[str, float]:
        return {"bytes": self.memory.nbytes}


class Plugin:
    @hookimpl
    def sley_records(self) -> list[MemoryPoolRecord]:
        return [MemoryPoolRecord(name="sized", config=SizedConfig, build=f"{__name__}:Sized")]

    @hookimpl
    def sley_scheduler_hooks(self) -> list[SchedulerHookRecord]:
        return [SchedulerHookRecord(name="user", config=UserConfig, build="nowhere:User")]


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Pools:
    monkeypatch.setattr(MemoryPoolRecord, "load", lambda record: Sized)
    tables = small_plan(
        scheduler_hooks=[{"use": "own.user", "pools": ["large"]}], pools={"large": {"use": "own.sized", "size": 64}}
    )
    plan = plan_from_dict(tables, loader=loader_of({"own": Plugin()}))
    return Pools(plan.pools, lambda name: plan.build_named("memory_pools", name))


def test_one_pool_for_all_who_name_it(pools: Pools) -> None:
    assert pools("large") is pools("large")
    assert pools("own.sized") is pools("own.sized") is not pools("large")
    assert [tensor.numel() for _, tensor in pools.held()] == [64, 8]
    assert [name for name, _ in pools.held()] == ["large.all", "own.sized.all"]


def test_a_name_that_is_not_there_is_an_error(pools: Pools) -> None:
    with pytest.raises(PlanError, match="did you mean `large`"):
        pools("larg")

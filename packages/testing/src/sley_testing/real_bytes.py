"""Counts the bytes that a run on CPUs really takes, as the allocator tells: the oracle of what is estimated.

    real = ranks(2, 120)(real_bytes, tables, 3, folder=texts)     # of each rank
    estimated = rank_bytes(plan, rank, 2)

Since core 0.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.errors import KeyPath
from sley_core.plan.load import plan_from_dict
from sley_testing.live_bytes import memory_profile, peak_bytes


@dataclass(frozen=True)
class RealBytes:
    """states: what the run's parts hold after the last step. peak: the most at once, above what was there before assembly, and
    without the samples: the thread that reads them is not heard by torch's profiler (`RankBytes.batch` says what they take).
    found: values of the plan that only the run could determine, as the seconds of layers by which it cut the model.
    """

    states: dict[str, int]
    peak: int
    found: Mapping[KeyPath, Any]


def real_bytes(tables: Mapping[str, Any], num_steps: int = 3, *, folder: Path | None = None) -> RealBytes:
    """Takes `num_steps` steps of the plan in `tables` on this rank of the world that the environment describes."""
    plan = plan_from_dict(tables, folder)
    with World.join("cpu") as world, memory_profile() as profile, assemble(plan, world) as run:
        for _ in range(num_steps):
            run.step()
        states = dict(run.memory.bytes)
        found = dict(run.facts.found)
    return RealBytes(states, peak_bytes(profile), found)

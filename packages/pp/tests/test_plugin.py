"""What the plugin says it has is there, and can be known without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sley_core.actions.action import Kind, Schedule
from sley_core.actions.lower import lower
from sley_core.plan.loader import Loader
from sley_pp import plugin

PP = Loader({"pp": plugin}).load("pp")


@pytest.mark.parametrize("name", sorted(set(PP.records["schedules"]) - {"csv"}))
def test_every_schedule_is_built_from_its_defaults(name):
    record = PP.records["schedules"][name]
    schedule = PP.build_of(record)(record.config())
    assert isinstance(schedule, Schedule)
    lowered = lower(schedule.lists(4, 6), schedule.placement(4), 6)
    assert all(
        sum(step.kind is Kind.CHUNK_DONE for step in steps if hasattr(step, "kind")) == schedule.chunks for steps in lowered
    )


@pytest.mark.parametrize("name", ["uniform", "balanced", "measured"])
def test_every_partition_is_built_from_its_defaults(name):
    record = PP.records["partitioners"][name]
    assert PP.build_of(record)(record.config())([1.0] * 8, 4) == (0, 2, 4, 6, 8)


def test_schedules_and_partitions_need_no_torch():
    modules = ("sley_pp.plugin", "sley_pp.schedules", "sley_pp.partitioners", "sley_core.actions.simulate")
    program = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0

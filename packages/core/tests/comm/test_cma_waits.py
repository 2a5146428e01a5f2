"""How often a rank looks whether what it waits for has come, by a clock of the test's own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sley_core.comm.progress import Progress
from sley_core.comm.transport.cma import connection
from sley_core.comm.transport.cma.connection import Connection


class Clock:
    """Time that passes while somebody sleeps, and a microsecond with each look at it."""

    def __init__(self):
        self.now, self.sleeps = 0.0, []

    def perf_counter(self):
        self.now += 1e-6
        return self.now

    def sleep(self, seconds):
        self.sleeps.append((self.now, seconds))
        self.now += seconds


@pytest.mark.parametrize("until_s", [0.002, 0.4])
def test_a_long_wait_looks_seldom_and_a_short_one_often(monkeypatch, until_s):
    """Who waits for a slow rank leaves it the core, and is told at once where little was waited."""
    monkeypatch.setattr(connection, "time", clock := Clock())
    waiting = Connection.__new__(Connection)
    waiting.timeout_s = 60.0
    turn = SimpleNamespace(members=SimpleNamespace(progress=Progress()))
    waiting.wait_until(lambda: clock.now >= until_s, lambda: 0, turn)
    assert clock.now <= until_s * (1 + 1 / 15)
    assert all(slept <= max(50e-6, min(before / 16, 1e-3)) for before, slept in clock.sleeps)
    assert len(clock.sleeps) <= 2 + until_s / 1e-3 + 60, len(clock.sleeps)

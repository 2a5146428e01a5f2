"""How often a rank looks whether what it waits for has come, by a clock of the test's own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sley_cma import connection
from sley_cma.connection import Connection
from sley_core.comm.progress import Progress


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
    assert clock.now <= max(until_s * (1 + 1 / 60), until_s + 60e-6)
    assert all(slept <= max(51e-6, min(before / 64, 5.1e-4)) for before, slept in clock.sleeps)
    assert len(clock.sleeps) <= 25 + until_s / 5e-4 + 200 * (until_s > 0.01), len(clock.sleeps)

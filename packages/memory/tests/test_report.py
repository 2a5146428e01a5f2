"""What moving memory has cost is in every row, in the counts of a run, and in its closing table."""

from __future__ import annotations

import math

import pytest
from odd_parts import PLAN
from parking import BETWEEN, EVERYTHING, cycle, running

pytestmark = pytest.mark.timeout(120)


def test_a_row_has_what_moved_since_the_row_before():
    with running({**PLAN, "offload": EVERYTHING}) as run:
        first = run.step()
        assert (first["offload/gb"], first["offload/s"], first["offload/gb_per_s"]) == (0, 0, 0)
        cycle(run)
        second = run.step()
        report = run.memory.report.values()
        assert second["offload/gb"] == sum(moved.copied_out + moved.copied_in for moved in report) / 1e9 > 0
        seconds = sum(moved.seconds_out + moved.seconds_in for moved in report)
        assert second["offload/s"] == seconds > 0
        assert math.isclose(second["offload/gb_per_s"], second["offload/gb"] / seconds)
        assert run.step()["offload/gb"] == 0
    with running(PLAN) as run:
        assert not [name for name in run.step() if name.startswith("offload")]


def test_counts_name_each_part():
    with running({**PLAN, "offload": EVERYTHING}) as run:
        run.step()
        cycle(run)
        cycle(run)
        counts = run.counts["memory.everything"]
        sizes = run.memory.bytes
        assert counts["weights_given_back"] == sizes["weights"]
        assert counts["weights_copied_in"] == 2 * sizes["weights"]
        assert counts["weights_copied_out"] + counts["weights_skipped"] == 2 * sizes["weights"]
        assert counts["weights_gb_per_s_out"] > 0
        assert counts["weights_host_bytes"] == 4096
        assert "masters_copied_out" not in counts, "there are none"
    with running({**PLAN, "offload": [*BETWEEN, {"use": "memory.weights"}]}) as run:
        run.step()
        assert run.counts["memory.weights"] == {}
        assert run.counts["memory.optimizer_states"]["optimizer_states_copied_out"] > 0

"""What moving memory has cost is in every row, in the counts of a run, and in its closing table."""

from __future__ import annotations

import math

import pytest
from odd_parts import PLAN
from parking import BETWEEN, EVERYTHING, cycle, running

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    ("offload", "parts"),
    [
        (EVERYTHING, ("weights", "buffers", "masters", "optimizer_states")),
        (BETWEEN, ("optimizer_states",)),
        ([{"use": "memory.host_optimizer"}], ("masters", "optimizer_states")),
    ],
    ids=["everything", "between steps", "on the host"],
)
def test_a_row_has_bytes_seconds_and_rate_of_each_part(offload, parts):
    """All parts together are the run's; what is freed and not copied has no numbers."""
    with running({**PLAN, "precision": {"compute": "bf16"}, "offload": offload}) as run:
        for _ in range(2):
            run.step()
            if offload is EVERYTHING:
                cycle(run)
        row = {name.removeprefix("offload/"): value for name, value in run.step().items() if "offload/" in name}
        moving = {name.removesuffix("_gb_per_s") for name in row if name.endswith("_gb_per_s")} - {"gb_per_s"}
        assert moving == {*parts} | ({"handlers"} if offload is EVERYTHING else set())
        for part in parts:
            assert row[f"{part}_gb"] > 0, part
            assert row[f"{part}_s"] > 0, part
            assert math.isclose(row[f"{part}_gb_per_s"], row[f"{part}_gb"] / row[f"{part}_s"]), part
        for name in ("gb", "s"):
            assert math.isclose(row[name], sum(row[f"{part}_{name}"] for part in moving))
        if offload is EVERYTHING:
            size = run.memory.bytes["weights"] / 1e9
            assert row["weights_gb"] == pytest.approx(2 * size), "one cycle, out and in"


def test_counts_name_each_part():
    with running({**PLAN, "offload": EVERYTHING}) as run:
        run.step()
        cycle(run)
        cycle(run)
        counts = run.counts["memory.everything"]
        sizes = run.memory.bytes
        assert counts["weights_given_back"] == sizes["weights"]
        assert counts["weights_copied_in"] == 2 * sizes["weights"]
        assert counts["weights_copied_out"] == 2 * sizes["weights"]
        assert counts["weights_gb_per_s_out"] > 0
        assert counts["weights_host_bytes"] == 4096
        assert "masters_copied_out" not in counts, "there are none"
    with running({**PLAN, "offload": [*BETWEEN, {"use": "memory.weights"}]}) as run:
        run.step()
        assert run.counts["memory.weights"] == {}
        assert run.counts["memory.optimizer_states"]["optimizer_states_copied_out"] > 0

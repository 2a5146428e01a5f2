"""What `memory` does with activations changes no bit in pipelines and with sharded weights either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import Recorded, assert_same_run, record

PLAN = small_plan(
    model__num_layers=2, model__vocab_size=257, batch={"global_size": 4, "micro_size": 1}, evaluation={"every": 2, "steps": 1}
)
POLICIES: list[Tables] = [
    {"use": "core.keep"},
    {"use": "core.recompute"},
    {"use": "memory.host", "min_bytes": 256},
    {"use": "memory.selective"},
]
SHARDED: Tables = {"use": "isp.communicator"}
LAYOUTS: dict[str, Tables] = {
    "stages": {
        "model__num_layers": 6,
        "parallel": {"pp": 2},
        "pipeline": {"use": "pp.zero_bubble_v"},
        "partition": {"use": "pp.uniform"},  # two layers or more in each part: the last one's activations stay
    },
    "shards": {"parallel": {"dp": 2, "wp": 2}, "weights": SHARDED},
    "shards of modules": {
        "parallel": {"dp": 2, "wp": 2},
        "weights": SHARDED | {"unit": "module", "head": "vocabulary", "embedding": "hidden"},
    },
}


def trained(tables: Tables, folder: Path) -> tuple[Recorded, dict[str, dict[str, float]], bool]:
    """What a run of this rank recorded, its counts by who counts, those of the first step under "first", and whether memory
    of a pool was moved.
    """
    counts: dict[str, dict[str, float]] = {}
    is_leased = False
    name = tables["activations"]["use"]

    def prepare(run: Any) -> None:
        if name == "memory.host":
            policy, may_leave = run.caller.policy, run.caller.policy._may_leave

            def watched(tensor: Any, fixed: Any) -> bool:
                nonlocal is_leased
                spans = [(held.data_ptr(), held.data_ptr() + held.nbytes) for _, held in run.parts.pool.held()]
                leaves: bool = may_leave(tensor, fixed)
                is_leased |= leaves and any(first <= tensor.data_ptr() < last for first, last in spans)
                return leaves

            policy._may_leave = watched

        def count(row: Any) -> None:
            counts.update(run.counts)
            counts.setdefault("first", run.counts.get(name, {}))

        run.listeners.append(count)

    return record(tables, 3, folder=folder, prepare=prepare), counts, is_leased


def trained_all(plans: list[Tables], folder: Path) -> list[Any]:
    return [trained(tables, folder) for tables in plans]


def gathers(counts: dict[str, dict[str, float]]) -> dict[str, float]:
    own = counts.get("isp.communicator", {})
    return {name: value for name, value in own.items() if "gather" in name or "allocations" in name}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_activations_that_leave_change_no_bit(ranks: Any, texts: Path, layout: str) -> None:
    """A layer that runs again gathers as often as with `core.recompute`, and none that waits on the host gathers more."""
    plans = [changed(PLAN, activations=policy, **LAYOUTS[layout]) for policy in POLICIES]
    for keep, recompute, host, selective in ranks(2, 160)(trained_all, plans, texts):
        assert_same_run(keep[0], host[0])
        assert_same_run(keep[0], selective[0])
        first, moved = host[1]["first"], host[1]["memory.host"]
        # In the first step memory leaves behind the next layer: a backward that follows at once finds it still here.
        assert first["moved_bytes"] >= first["fetched_bytes"] > 0
        assert moved["moved_bytes"] - first["moved_bytes"] == moved["fetched_bytes"] - first["fetched_bytes"] > 0
        assert moved["host_allocations"] < moved["moved_storages"] / 4
        assert not host[2], "memory of a pool left"
        assert selective[1]["memory.selective"]["kept_attentions"] > 0
        assert gathers(host[1]) == gathers(keep[1])
        assert gathers(selective[1]) == gathers(recompute[1])

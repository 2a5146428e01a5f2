"""What `memory` does with activations changes no bit in pipelines and with sharded weights either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import Recorded, assert_same_run, record

PLAN = small_plan(
    model__num_layers=2, model__vocab_size=257, batch={"global_size": 4, "micro_size": 1}, evaluation={"every": 2, "steps": 1}
)
POLICIES: dict[str, Tables] = {
    "memory.host": {"use": "memory.host", "min_bytes": 256},
    "memory.selective": {"use": "memory.selective"},
}


def all_of(plans: list[Tables], folder: Path) -> list[tuple[Recorded, dict[str, float], bool]]:
    """Each plan on these ranks: what a run recorded, what its policy counted, and whether a pool's memory was moved."""
    found = []
    for tables in plans:
        counts: dict[str, float] = {}
        leased: list[bool] = [False]

        def prepare(run: Any, counts: Any = counts, leased: Any = leased, name: str = tables["activations"]["use"]) -> None:
            policy = run.caller.policy
            if name == "memory.host":
                may_leave = policy._may_leave

                def watched(tensor: Any, fixed: Any) -> bool:
                    spans = [(held.data_ptr(), held.data_ptr() + held.nbytes) for _, held in run.parts.pool.held()]
                    leaves: bool = may_leave(tensor, fixed)
                    leased[0] |= leaves and any(first <= tensor.data_ptr() < last for first, last in spans)
                    return leaves

                policy._may_leave = watched

            def count(row: Any) -> None:
                counts.update(run.counts.get(name, {}))
                if row["step"] == 1:
                    counts["first_moved"], counts["first_fetched"] = (
                        counts.get(f"{way}_bytes", 0.0) for way in ("moved", "fetched")
                    )

            run.listeners.append(count)

        found.append((record(tables, 3, folder=folder, prepare=prepare), counts, leased[0]))
    return found


def compare(ranks: Any, texts: Path, plan: Tables) -> None:
    """Each of two ranks has the bits of the plan with `core.keep`, and those with blocks moved or kept something."""
    every = [changed(plan, activations=policy) for policy in ({"use": "core.keep"}, *POLICIES.values())]
    for (kept, _, _), (host, moved, is_leased), (selective, counts, _) in ranks(2, 120)(all_of, every, texts):
        assert_same_run(kept, host)
        assert_same_run(kept, selective)
        # In the first step memory leaves behind the next layer: a backward that follows at once finds it still here.
        assert moved["first_moved"] >= moved["first_fetched"] > 0
        later = {way: moved[f"{way}_bytes"] - moved[f"first_{way}"] for way in ("moved", "fetched")}
        assert later["moved"] == later["fetched"] > 0
        assert moved["host_allocations"] < moved["moved_storages"] / 4
        assert not is_leased, "memory of a pool left"
        assert counts["kept_attentions"] > 0


MODULES = {"use": "isp.communicator", "unit": "module", "head": "vocabulary", "embedding": "hidden"}
LAYOUTS: dict[str, Tables] = {
    "stages": {
        "model__num_layers": 6,
        "parallel": {"pp": 2},
        "pipeline": {"use": "pp.zero_bubble_v"},
        "partition": {"use": "pp.uniform"},  # two layers or more in each part: the last one's activations stay
    },
    "shards": {"parallel": {"dp": 2, "wp": 2}, "weights": MODULES},
    "slices": {
        "parallel": {"dp": 1, "sp": 2},
        "sequence": {"use": "isp.all_to_all", "positions": False},
        "model": {"factory": "two_attentions:layers"},
    },
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_activations_that_leave_change_no_bit(ranks: Any, texts: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """Of several chunks per stage with backwards in two halves; an attention over slices is tried out in its first forward."""
    monkeypatch.syspath_prepend(Path(__file__).parent / "own")
    compare(ranks, texts, changed(PLAN, **LAYOUTS[layout]))


@pytest.mark.timeout(200)
def test_gathers_are_those_of_recomputation(ranks: Any, texts: Path) -> None:
    """A layer that runs again gathers as often as with `core.recompute`, and none that waits on the host gathers more."""
    plan = changed(PLAN, parallel={"dp": 2, "wp": 2}, weights={"use": "isp.communicator"})
    uses = ["core.keep", "memory.host", "core.recompute", "memory.selective"]
    for keep, host, again, selective in ranks(2, 120)(
        gathers, [changed(plan, activations={"use": use}) for use in uses], texts
    ):
        assert host == keep
        assert selective == again


def gathers(plans: list[Tables], folder: Path) -> list[dict[str, float]]:
    found = []
    for tables in plans:
        with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
            for _ in range(2):
                run.step()
            counts = run.counts["isp.communicator"]
            found.append({name: value for name, value in counts.items() if "gather" in name or "allocations" in name})
    return found

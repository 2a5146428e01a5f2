"""The counts of exchanges and memory pools."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sley_testing.plans import Tables, small_plan
from sley_testing.runs import record, running

pytestmark = pytest.mark.timeout(200)

HELD_OUT = {"evaluation": {"every": 9, "steps": 3}}
ISP = {"use": "isp.communicator"}
SENT = "sent_bytes_per_step"
EXCHANGES: dict[str, Tables] = {
    "each": {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "core.each"}]},
    "bucketed": {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "dp.bucketed"}]},
    "bf16": {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "dp.bucketed", "reduction": "bf16"}]},
    "low rank": {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "powersgd.reducer", "rank": 1, "start_step": 2}]},
    "stages": {"parallel": {"pp": 2}, "pipeline": {"use": "pp.gpipe"}, "model__tie_embeddings": True},
    "weights": {"parallel": {"dp": 2, "wp": 2}, "weights": ISP},
}


def sent_bytes(plans: dict[str, Tables], folder: Path) -> dict[str, tuple[dict[str, Any], int, int]]:
    """Returns the counts of two steps of each plan on this rank, the bytes of its gradients, and those of tied gradients."""
    results = {}
    for name, tables in plans.items():
        with running(tables, folder) as run:
            run.step()
            run.step()
            run.evaluate()  # an evaluation after the last step does not count
            gradients = {param: run.store.gradient(param).nbytes for param in run.registry}
            ties = sum(size for param, size in gradients.items() if param.tie_axis)
            results[name] = run.counts, sum(gradients.values()), ties
    return results


def test_handlers_and_links_count_sent_bytes(ranks: Callable[..., Any], texts: Path) -> None:
    """Over two ranks an all-reduce sends as many bytes as it sums."""
    plans = {name: small_plan(**changes, **HELD_OUT) for name, changes in EXCHANGES.items()}
    for results in ranks(2)(sent_bytes, plans, texts):
        counts = {name: rank[0] for name, rank in results.items()}
        each, bucketed = counts["each"]["core.each"][SENT], counts["bucketed"]["dp.bucketed"][SENT]
        assert each == results["each"][1]
        assert each <= bucketed < 1.2 * each  # with what aligns gradients
        assert counts["bf16"]["dp.bucketed"][SENT] == pytest.approx(bucketed / 4, rel=0.01)
        assert 0 < counts["low rank"]["powersgd.reducer"][SENT] < each / 3
        assert counts["stages"]["pp.shared_modules"][SENT] == results["stages"][2] > 0
        messages = 4 * 2 * 24 * 16 * 8  # microbatches of samples of tokens of width 16 in fp64
        assert messages < counts["stages"]["pp.link"][SENT] < messages + 4 * 4096  # with heads
        isp = counts["weights"]["isp.communicator"]
        assert isp[SENT] == isp["gathered_bytes_per_step"] + isp["reduced_bytes_per_step"] > 0


POOLED = small_plan(
    model__vocab_size=257,
    batch__micro_size=1,
    parallel={"pp": 2, "dp": 2, "wp": 2},
    pipeline={"use": "pp.zero_bubble_h1"},
    weights=ISP,
)


def record_pool(folder: Path) -> list[dict[str, float]]:
    """Returns the counts of the pool after each of four steps."""
    counts: list[dict[str, float]] = []

    def prepare(run: Any) -> None:
        run.listeners.append(lambda _: counts.append(run.counts["core.pool"]))

    record(POOLED, 4, folder=folder, prepare=prepare)
    return counts


def test_weights_and_messages_share_a_pool(ranks: Any, texts: Path) -> None:
    """Nothing is allocated after the second step, and no buffer is lent after a step."""
    for counts in ranks(4, 180)(record_pool, texts):
        assert counts[1]["allocations"] == counts[3]["allocations"] > 0
        assert counts[3]["hit_rate"] > 0.8
        assert counts[3]["lent_bytes"] == 0

"""Counts of exchanges and memory: in `summary.json`, on stderr with `-v`, in one pool, and in the parts of `run.memory`."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sley_memory.leaks import find_leaks
from sley_testing.parity import assert_same_bits
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import record, running

pytestmark = pytest.mark.timeout(200)

HELD_OUT = {"evaluation": {"every": 9, "steps": 3}}
ISP = {"use": "isp.communicator"}


def test_counts_of_offloads_are_printed(cli: Callable[..., Any], plan: Path, folder: Path) -> None:
    """States leave in each of three steps, and come back in all but the first, which makes them."""
    between = """offload=[{use="memory.optimizer_states", when="between_steps"}]"""
    result = cli("run", plan, "--set", "parallel.dp=1", "--set", "run.steps=3", "--set", between, "-v")
    assert result.code == 0, result.err
    summary = json.loads((folder / "runs" / "small" / "summary.json").read_text("utf-8"))
    counts = summary["counts"]["memory.optimizer_states"]
    size, step = 2 * 4 * summary["trained_parameters"], counts["optimizer_states_copied_out"] / 3  # two moments in fp32
    assert size <= step < 1.02 * size  # small states lie together, each at a multiple of 256 bytes
    assert counts["optimizer_states_copied_in"] == 2 * step
    lines = [line.split() for line in result.err.splitlines()]
    assert ["memory.optimizer_states", "counted"] in lines
    assert all([key, f"{value:,.10g}"] in lines for key, value in counts.items())


SENT = "sent_bytes_per_step"
EXCHANGES: dict[str, Tables] = {
    "each": {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "core.each"}]},
    "bucketed": {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "dp.bucketed"}]},
    "bf16": {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "dp.bucketed", "reduction": "bf16"}]},
    "low rank": {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "powersgd.reducer", "rank": 1, "start_step": 2}]},
    "stages": {"parallel": {"pp": 2}, "pipeline": {"use": "pp.gpipe"}, "model__tie_embeddings": True},
    "weights": {"parallel": {"dp": 2, "wp": 2}, "weights": ISP},
}


def counted(plans: dict[str, Tables], folder: Path) -> dict[str, tuple[dict[str, Any], int, int]]:
    """Returns for each plan on this rank: the counts of two steps, the bytes of gradients, and those of ties among them."""
    found = {}
    for name, tables in plans.items():
        with running(tables, folder) as run:
            run.step()
            run.step()
            run.evaluate()  # after the last step, as at the end of a run: it counts for nothing
            gradients = {param: run.store.gradient(param).nbytes for param in run.registry}
            ties = sum(size for param, size in gradients.items() if param.tie_group)
            found[name] = run.counts, sum(gradients.values()), ties
    return found


def test_all_that_exchange_count_the_bytes_that_they_send(ranks: Callable[..., Any], texts: Path) -> None:
    """Over two ranks an all-reduce sends as many bytes as it sums."""
    plans = {name: small_plan(**changes, **HELD_OUT) for name, changes in EXCHANGES.items()}
    for found in ranks(2)(counted, plans, texts):
        counts = {name: rank[0] for name, rank in found.items()}
        each, bucketed = counts["each"]["core.each"][SENT], counts["bucketed"]["dp.bucketed"][SENT]
        assert each == found["each"][1]
        assert each <= bucketed < 1.2 * each  # with what aligns gradients
        assert counts["bf16"]["dp.bucketed"][SENT] == pytest.approx(bucketed / 4, rel=0.01)
        assert 0 < counts["low rank"]["powersgd.reducer"][SENT] < each / 3
        assert counts["stages"]["pp.shared_modules"][SENT] == found["stages"][2] > 0
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
SHARED = changed(
    POOLED,
    weights={"use": "isp.communicator", "pool": "common"},
    link={"use": "pp.link", "pool": "common"},
    pools={"common": {"use": "memory.size_classes", "per_doubling": 2}},
)


def pooled(tables: Tables, folder: Path) -> tuple[Any, list[dict[str, float]]]:
    """Returns four recorded steps, and the counts of the shared pool after each."""
    counts: list[dict[str, float]] = []

    def prepare(run: Any) -> None:
        run.listeners.append(lambda _: counts.append(run.counts.get("pools.common", {})))

    return record(tables, 4, folder=folder, prepare=prepare), counts


def test_weights_and_messages_share_a_pool(ranks: Any, texts: Path) -> None:
    """The bits are the same, nothing is allocated after the second step, and no lease outlives its step."""
    apart, together = (ranks(4, 180)(pooled, tables, texts) for tables in (POOLED, SHARED))
    for (expected, _), (recorded, counts) in zip(apart, together, strict=True):
        assert_same_bits(expected.weights, recorded.weights)
        assert counts[1]["allocations"] == counts[3]["allocations"] > 0
        assert counts[3]["hit_rate"] > 0.8
        assert counts[3]["lent_bytes"] == 0


EXAMPLES = {path.stem: path for path in (Path(__file__).parents[3] / "examples" / "plans").glob("*.toml")}
IN_CI = ("dp-bf16", "isp")
SMALL = 1024
"""Bytes. The words that ranks exchange beside tensors are fewer."""


def uncounted(tables: Tables, folder: Path) -> tuple[list[str], dict[str, int]]:
    """Returns tensors that live after two steps on this rank and are in no part, and the bytes of each part."""
    with running(tables, folder) as run:
        run.step()
        run.step()
        data = (".feed.", ".dataset.", "PrefetchThread")
        leaks = [str(leak) for leak in find_leaks(run, SMALL) if not any(word in leak.path for word in data)]
        return leaks, run.memory.bytes


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_CI else pytest.mark.campaign) for name in sorted(EXAMPLES)]
)
def test_every_buffer_is_in_a_part_of_memory(ranks: Any, texts: Path, name: str) -> None:
    """Trains an example plan on a few samples of the test's texts. All other tensors belong to the data."""
    tables = tomllib.loads(EXAMPLES[name].read_text())
    del tables["plan"]
    data = {"use": "data.text", "files": ["text/*.txt"], "sequence": 32, "separator": "\n\n"}
    tables = changed(tables, data=data, evaluation=None, checkpoint=None, run__device="cpu", run__steps=2)
    parallel = tables.get("parallel", {})
    size = parallel.get("pp", 1) * parallel.get("dp", 1) * parallel.get("sp", 1)
    for leaks, num_bytes in ranks(size)(uncounted, tables, texts):
        assert not leaks
        assert num_bytes["weights"] > SMALL
        assert bool(num_bytes["messages"]) == ("reduction" in str(tables.get("gradient_handlers")))

"""`[loss] chunk_tokens` changes no loss and no gradient in any layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import Recorded, assert_parity_of_parts, record, record_reference

WP = {"dp": 2, "wp": 2}
ISP = "isp.communicator"
LAYOUTS: dict[str, dict[str, Tables]] = {
    "dp": {
        "bucketed": {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "dp.bucketed", "bucket_mb": 0.001}]},
        "sharded": {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "dp.sharded", "bucket_mb": 0.001}]},
        "canonical": {"parallel": {"dp": 2, "reduction": "canonical"}},
        "host": {"parallel": {"dp": 2}, "activations": {"use": "memory.host"}, "offload": [{"use": "memory.everything"}]},
    },
    "pp": {
        "gpipe": {"parallel": {"pp": 2, "dp": 1}, "pipeline": {"use": "pp.gpipe"}},
        "zero bubble": {"parallel": {"pp": 2, "dp": 1}, "pipeline": {"use": "pp.zero_bubble_h1"}},
    },
    "wp": {
        "layer": {"parallel": WP, "weights": {"use": ISP}},
        "module": {"parallel": WP, "weights": {"use": ISP, "unit": "module", "overlap": False}},
        "step": {"parallel": WP, "weights": {"use": ISP, "reduce": "step"}},
        "vocabulary": {"parallel": WP, "weights": {"use": ISP, "head": "vocabulary"}},
        "canonical": {"parallel": WP | {"reduction": "canonical"}, "weights": {"use": ISP}},
        "slices": {"parallel": {"dp": 1, "wp": 2, "sp": 2}, "weights": {"use": ISP}, "sequence": {"use": "isp.all_to_all"}},
    },
}


def record_plans(plans: Sequence[Tables], folder: Path) -> list[Recorded]:
    """Records several plans one after another on the same ranks."""
    return [record(tables, 3, folder=folder) for tables in plans]


@pytest.mark.sample(1)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_chunks_equal_the_plain_head_in_one_process(ranks: Any, texts: Path, kind: str, tied: bool) -> None:
    tables = small_plan(model__tie_embeddings=tied, evaluation={"every": 9, "steps": 1}, run__steps=4)
    chunks = {"use": "core.cross_entropy", "chunk_tokens": 10}
    plans = [changed(tables, loss=chunks, **layout) for layout in LAYOUTS[kind].values()]
    if tied and kind == "pp":
        plans = [changed(plan, gradient_handlers=[{"use": "pp.shared_modules"}]) for plan in plans]
    reference = record_reference(tables, 3, folder=texts)
    for layout, runs in zip(LAYOUTS[kind], zip(*ranks(2)(record_plans, plans, texts), strict=True), strict=True):
        print(layout)
        assert_parity_of_parts(reference, runs, "fp64")


@pytest.mark.parametrize("head", ["gather", "vocabulary"])
def test_ranks_with_different_sources_compute_their_losses_together(ranks: Any, texts: Path, head: str) -> None:
    """Each microbatch is one sample, whose source differs between ranks. All ranks make the same exchanges."""
    text = {"use": "data.text", "sequence": 24, "weight": 1.0}
    sources = [text | {"name": name, "files": [f"text/{name}.txt"]} for name in "ab"]
    tables = small_plan(data={"use": "data.mixture", "sequence": 24, "sources": sources}, batch__micro_size=1)
    chunks = {"use": "core.cross_entropy", "chunk_tokens": 10}
    plan = changed(tables, loss=chunks, parallel=WP, weights={"use": ISP, "head": head})
    reference = record_reference(tables, 2, folder=texts)
    for run in ranks(2)(record, plan, 2, folder=texts):
        for expected, actual in zip(reference.rows, run.rows, strict=True):
            assert [actual[name] for name in ("loss/a", "loss/b")] == pytest.approx(
                [expected["loss/a"], expected["loss/b"]], rel=1e-9
            )

"""Layouts on CUDA have the numbers of one process there, and go on from each other's checkpoints.

Ranks share one device: by gloo, or by NCCL where it lets them (NCCL_MULTI_RANK_GPU_ENABLE=1).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sley_testing.checkpointer_contract import assert_goes_on, assert_same_stretch, saving_at, stretch
from sley_testing.plans import changed, small_plan
from sley_testing.runs import assert_parity_of_parts, record

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

PLAN = small_plan(
    run={"name": "layout", "steps": 6, "device": "cuda", "seed": 7},
    model__num_layers=4,
    model__tie_embeddings=True,
    batch__micro_size=1,
)
BUCKETS = [{"use": "dp.bucketed", "bucket_mb": 0.02}]
SHARDED = [{"use": "dp.sharded", "bucket_mb": 0.02}]
WEIGHTS = {"use": "isp.communicator"}
ONE_F_ONE_B = {"use": "pp.one_f_one_b"}
TIED = [{"use": "pp.shared_modules"}]

LAYOUTS: dict[str, dict[str, Any]] = {
    "buckets": {"parallel": {"dp": 2}, "gradient_handlers": BUCKETS},
    "sharded optimizer": {"parallel": {"dp": 2}, "gradient_handlers": SHARDED},
    "sharded weights": {"parallel": {"dp": 2, "wp": 2}, "weights": WEIGHTS},
    "slices of sequences": {"parallel": {"sp": 2}, "sequence": {"use": "isp.all_to_all"}},
    "interleaved stages": {"parallel": {"pp": 2}, "pipeline": {"use": "pp.interleaved", "chunks": 2}},
    "canonical sums": {"parallel": {"dp": 2, "reduction": "canonical"}, "gradient_handlers": BUCKETS},
    "buckets of stages": {"parallel": {"dp": 2, "pp": 2}, "pipeline": ONE_F_ONE_B, "gradient_handlers": BUCKETS + TIED},
    "sharded optimizer of stages": {
        "parallel": {"dp": 2, "pp": 2},
        "pipeline": {"use": "pp.zero_bubble_h1"},
        "gradient_handlers": SHARDED + TIED,
    },
    "sharded weights of stages": {"parallel": {"dp": 2, "wp": 2, "pp": 2}, "pipeline": ONE_F_ONE_B, "weights": WEIGHTS},
    "replicas of sharded weights": {"parallel": {"dp": 4, "wp": 2}, "weights": WEIGHTS},
}


def num_ranks(layout: dict[str, Any]) -> int:
    sizes = layout["parallel"]
    return int(sizes.get("dp", 1) * sizes.get("pp", 1) * sizes.get("sp", 1))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_equals_one_process(ranks: Callable[..., Any], texts: Path, name: str) -> None:
    layout = LAYOUTS[name]
    reference = record(PLAN, 3, folder=texts)
    found = ranks(num_ranks(layout), timeout_s=180, init=False)(record, changed(PLAN, **layout), 3, folder=texts)
    assert_parity_of_parts(reference, found, "fp64")


@pytest.mark.parametrize("name", ["buckets", "sharded optimizer", "sharded weights", "interleaved stages"])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_layout_is_close_in_narrow_types(ranks: Callable[..., Any], texts: Path, name: str, compute: str) -> None:
    tables = changed(PLAN, precision__compute=compute)
    reference = record(tables, 3, folder=texts)
    found = ranks(2, timeout_s=180, init=False)(record, changed(tables, **LAYOUTS[name]), 3, folder=texts)
    assert_parity_of_parts(reference, found, compute)


def test_a_run_goes_on_from_its_checkpoint(texts: Path, tmp_path: Path) -> None:
    tables = changed(PLAN, precision__compute="bf16")
    whole = stretch(tables, 6, folder=texts, prepare=saving_at(3, tmp_path / "saved"))
    assert_same_stretch([whole], [stretch(tables, 3, folder=texts, load=tmp_path / "saved")])


def test_layouts_go_on_from_each_other(ranks: Callable[..., Any], texts: Path, tmp_path: Path) -> None:
    whole = stretch(PLAN, 6, folder=texts)
    first, second = (changed(PLAN, **LAYOUTS[name]) for name in ("sharded optimizer", "sharded weights"))
    ranks(2, timeout_s=180, init=False)(stretch, first, 3, folder=texts, save=tmp_path / "saved")
    after = ranks(2, timeout_s=180, init=False)(stretch, second, 3, folder=texts, load=tmp_path / "saved")
    assert_goes_on(whole, after, "fp64")

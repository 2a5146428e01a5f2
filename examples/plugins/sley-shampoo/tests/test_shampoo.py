"""Shampoo passes the contract of optimizers, and has the update of one process in every layout."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from sley_testing.optimizer_contract import OptimizerContract
from sley_testing.plans import changed, small_plan
from sley_testing.runs import assert_parity_of_parts, assert_resumed_parity, record, record_reference

SHAMPOO: dict[str, Any] = {"use": "shampoo.optimizer", "lr": 0.01, "weight_decay": 0.1, "every": 2}
PLAN = small_plan(optimizer=SHAMPOO, model__ffn_hidden=27, data__sequence=16)
SHARDED = {"gradient_handlers": [{"use": "dp.sharded", "bucket_mb": 0.01}]}
WP = {"weights": {"use": "isp.communicator"}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "sharded": {"parallel": {"dp": 2}, **SHARDED},
    "wp": {"parallel": {"dp": 2, "wp": 2}, **WP},
    "wp, sharded": {"parallel": {"dp": 4, "wp": 2}, **WP, **SHARDED},
    "stages": {"parallel": {"dp": 1, "pp": 2}, "pipeline": {"use": "pp.zero_bubble_h1"}},
    "copies": {"parallel": {"dp": 2}, "gradient_handlers": [{"use": "dp.bucketed"}]},
}


class TestShampoo(OptimizerContract):
    optimizer: ClassVar[dict[str, Any]] = SHAMPOO


def num_ranks(layout: str) -> int:
    parallel = LAYOUTS[layout]["parallel"]
    return int(parallel["dp"] * parallel.get("pp", 1))


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["wp, sharded", "stages", "sharded", "wp", "copies"])
def test_layouts_match_one_process(ranks: Callable[..., Any], texts: Path, layout: str) -> None:
    results = ranks(num_ranks(layout))(record, changed(PLAN, **LAYOUTS[layout]), 3, folder=texts)
    assert_parity_of_parts(record_reference(PLAN, 3, folder=texts), results, "fp64")


def save_and_resume(first: dict[str, Any], second: dict[str, Any], folder: Path, path: Path) -> Any:
    record(first, 2, folder=folder, save=path)
    return record(second, 2, folder=folder, load=path)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("layout", "resumed"), [("sharded", "wp"), ("wp", "sharded")])
def test_other_layouts_resume(ranks: Callable[..., Any], texts: Path, tmp_path: Path, layout: str, resumed: str) -> None:
    """Statistics are no larger than one dim of a matrix. They are with the owner, and any layout reads them."""
    plans = [changed(PLAN, **LAYOUTS[name]) for name in (layout, resumed)]
    results = ranks(2)(save_and_resume, *plans, texts, tmp_path / "saved")
    assert_resumed_parity(record(PLAN, 4, folder=texts), results, "fp64")

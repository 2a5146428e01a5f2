"""Small plans for the tests of `isp`, and the comparison of layouts with one process."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sley_testing.contract import SQUARES
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import RunRecord, assert_equal_replicas, assert_parity, record, record_reference

OWN = Path(__file__).parent / "own"
sys.path.insert(0, str(OWN))

PLAN = small_plan(
    run__steps=3,  # one more than is recorded: the last one evaluates, and `record` does
    model__num_layers=2,
    model__heads=2,
    model__kv_heads=None,
    model__ffn_hidden=27,
    model__vocab_size=257,
    optimizer__weight_decay=0.1,
    evaluation={"every": 9, "steps": 1},
)

HELD_OUT = {"fp64": 1e-9, "fp32": 1e-5, "bf16": 2**-7}
"""Relative tolerance of held-out losses after two steps."""


@pytest.fixture
def own() -> Path:
    """The folder of the plans' modules, which is on the path of all ranks."""
    return OWN


@pytest.fixture
def sharded() -> Callable[..., Tables]:
    """`sharded(wp, weights={...}, factory="", options={}, **changes)` returns the small plan with `wp`, unsharded if wp = 1.
    factory: a model of isp_models, with its data `Points` and the loss of a contract.
    """

    def sharded(
        wp: int, dp: int | None = None, weights: Tables | None = None, factory: str = "", options: Any = None, **changes: Any
    ) -> Tables:
        if factory:
            own = {"model": {"factory": f"isp_models:{factory}", "options": options or {}}}
            changes = own | {"data": {"factory": "isp_models:Points"}, "loss": SQUARES} | changes
        tables = changed(PLAN, **changes)
        tables["parallel"] = tables.get("parallel", {}) | {"dp": wp if dp is None else dp, "wp": wp}
        if wp > 1:
            tables["weights"] = {"use": "isp.communicator", **(weights or {})}
        return tables

    return sharded


def record_plans(plans: list[Tables], folder: Path) -> list[RunRecord]:
    """Records several plans one after another on the same ranks."""
    return [record(tables, 2, folder=folder) for tables in plans]


@pytest.fixture
def assert_parities(ranks: Any, texts: Path, sharded: Callable[..., Tables]) -> Callable[..., None]:
    """`assert_parities(world, cases, **changes)` asserts that ranks equal one process for each case, arguments of `sharded`."""

    def assert_parities(world: int, cases: list[Tables], **changes: Any) -> None:
        plans, references = [], []
        for case in cases:
            arguments = {"wp": world} | changes | case
            layout = ("wp", "dp", "weights", "parallel", "sequence")
            same = {key: value for key, value in arguments.items() if key not in layout}
            references.append(record_reference(sharded(1, 1, **same), 2, folder=texts))
            plans.append(sharded(**arguments))
        found = ranks(world, 180)(record_plans, plans, texts)
        for case, reference, layouts in zip(cases, references, zip(*found, strict=True), strict=True):
            print(case)
            precision = (changes | case).get("precision__compute", "fp64")
            assert_parity(reference, layouts, precision)
            assert_equal_replicas(layouts)
            for layout in layouts:
                assert layout.held_out_loss == pytest.approx(reference.held_out_loss, rel=HELD_OUT[precision])

    return assert_parities

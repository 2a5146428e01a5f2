"""What the tests of `isp` share: small plans, and how a layout is compared with one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sley_testing.parity import assert_same_bits
from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import Recorded, alone, assert_parity, record, same_on_all

OWN = Path(__file__).parent / "own"

PLAN = small_plan(
    run__steps=4,  # one more than is recorded: the last one evaluates, and `record` does
    model__num_layers=2,
    model__heads=2,
    model__kv_heads=None,
    model__ffn_hidden=27,
    model__vocab_size=257,
    optimizer__weight_decay=0.1,
    evaluation={"every": 9, "steps": 1},
)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the plans' own modules; it is on the path, in ranks too."""
    monkeypatch.syspath_prepend(OWN)
    return OWN


@pytest.fixture
def sharded() -> Callable[..., Tables]:
    """`sharded(wp, weights={...}, **changes)`: the small plan with its weights over `wp` ranks; wp = 1 leaves them whole."""

    def sharded(wp: int, dp: int | None = None, weights: Tables | None = None, **changes: Any) -> Tables:
        tables = changed(PLAN, **changes)
        tables["parallel"] = tables.get("parallel", {}) | {"dp": wp if dp is None else dp, "wp": wp}
        if wp > 1:
            tables["weights"] = {"use": "isp.communicator", **(weights or {})}
        return tables

    return sharded


@pytest.fixture
def parity(ranks: Any, texts: Path, sharded: Callable[..., Tables]) -> Callable[..., list[Recorded]]:
    """`parity(world, wp=..., dp=..., weights=..., **changes)`: every rank's run, which equals that of one process."""

    def parity(world: int, *, wp: int, dp: int | None = None, weights: Tables | None = None, **changes: Any) -> Any:
        same = {
            key: value for key, value in changes.items() if not key.startswith(("gradient_handlers", "parallel", "sequence"))
        }
        reference = alone(sharded(1, 1, **same), 3, folder=texts)
        found = ranks(world, 120)(record, sharded(wp, dp, weights, **changes), 3, folder=texts)
        assert_parity(reference, found, changes.get("precision__compute", "fp64"))
        for one in found[1:]:
            assert_same_bits(found[0].weights, one.weights)
        return found

    return parity


def recorded(plans: list[Tables], folder: Path) -> list[Recorded]:
    """Each of several plans, run one after the other on the same ranks."""
    return [record(tables, 3, folder=folder) for tables in plans]


@pytest.fixture
def parities(ranks: Any, texts: Path, sharded: Callable[..., Tables]) -> Callable[..., None]:
    """`parities(world, cases, weights, **changes)`: for each case, (wp, dp, more changes), every rank equals one process."""

    def parities(world: int, cases: list[tuple[int, int, Tables]], weights: Tables, **changes: Any) -> None:
        plans, references = [], []
        for wp, dp, more in cases:
            every = changes | more
            same = {key: value for key, value in every.items() if key not in ("parallel", "sequence")}
            references.append(alone(sharded(1, 1, **same), 3, folder=texts))
            plans.append(sharded(wp, dp, weights=weights, **every))
        found = ranks(world, 180)(recorded, plans, texts)
        for reference, layouts in zip(references, zip(*found, strict=True), strict=True):
            assert_parity(reference, layouts, changes.get("precision__compute", "fp64"))
            same_on_all(layouts)
            for layout in layouts:
                assert layout.held_out == pytest.approx(reference.held_out, rel=1e-9)

    return parities

"""What the tests of `isp` share: small plans, the text they read, and how a layout is compared with one process."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from sley_core.testing.parity import assert_same_bits
from sley_core.testing.runs import Recorded, assert_parity, record, same_on_all

OWN = Path(__file__).parent / "own"

PLAN: dict[str, Any] = {
    "run": {"name": "isp", "steps": 3, "device": "cpu", "seed": 7},
    "model": {"use": "core.llama", "num_layers": 3, "hidden": 16, "heads": 2, "ffn_hidden": 27, "vocab_size": 257},
    "data": {"use": "core.text", "files": ["text/*.txt"], "sequence": 24, "separator": "\n\n", "held_out": 0.1},
    "batch": {"global_size": 8, "micro_size": 2},
    "optimizer": {"use": "core.adamw", "lr": 3e-3, "clip_norm": 0.5, "weight_decay": 0.1},
    "evaluation": {"every": 2, "steps": 1},
    "precision": {"compute": "fp64"},
}

Tables = dict[str, Any]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan's folder with text files in it."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "text").mkdir()
    for name in ("a", "b"):
        documents = [f"{name}{number} " + "the sley beats home " * (number % 7) for number in range(60)]
        (folder / "text" / f"{name}.txt").write_text("\n\n".join(documents))
    return folder


def changed(tables: Tables, **changes: Any) -> Tables:
    """The tables with `table__key=value` set, or whole tables where there is no key."""
    tables = deepcopy(tables)
    for path, value in changes.items():
        table, _, key = path.partition("__")
        if key:
            tables.setdefault(table, {})[key] = value
        else:
            tables[table] = value
    return tables


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
def parity(ranks: Any, folder: Path, sharded: Callable[..., Tables]) -> Callable[..., list[Recorded]]:
    """`parity(world, wp=..., dp=..., weights=..., **changes)`: every rank's run, which equals that of one process."""

    def parity(world: int, *, wp: int, dp: int | None = None, weights: Tables | None = None, **changes: Any) -> Any:
        alone = {
            key: value
            for key, value in changes.items()
            if not key.startswith(("gradient_handlers", "parallel", "sequence"))
        }
        reference = record(sharded(1, 1, **alone), 3, folder=folder)
        found = ranks(world, 120)(record, sharded(wp, dp, weights, **changes), 3, folder=folder)
        assert_parity(reference, found, changes.get("precision__compute", "fp64"))
        for one in found[1:]:
            assert_same_bits(found[0].weights, one.weights)
        return found

    return parity


def recorded(plans: list[Tables], folder: Path) -> list[Recorded]:
    """Each of several plans, run one after the other on the same ranks."""
    return [record(tables, 3, folder=folder) for tables in plans]


@pytest.fixture
def parities(ranks: Any, folder: Path, sharded: Callable[..., Tables]) -> Callable[..., None]:
    """`parities(world, cases, weights, **changes)`: for each case, (wp, dp, more changes), every rank equals one process."""

    def parities(world: int, cases: list[tuple[int, int, Tables]], weights: Tables, **changes: Any) -> None:
        plans, references = [], []
        for wp, dp, more in cases:
            every = changes | more
            alone = {key: value for key, value in every.items() if key not in ("parallel", "sequence")}
            references.append(record(sharded(1, 1, **alone), 3, folder=folder))
            plans.append(sharded(wp, dp, weights=weights, **every))
        found = ranks(world, 180)(recorded, plans, folder)
        for reference, layouts in zip(references, zip(*found, strict=True), strict=True):
            assert_parity(reference, layouts, changes.get("precision__compute", "fp64"))
            same_on_all(layouts)
            for layout in layouts:
                assert layout.held_out == pytest.approx(reference.held_out, rel=1e-9)

    return parities

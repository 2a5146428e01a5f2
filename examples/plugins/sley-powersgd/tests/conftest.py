"""What these tests share: a small plan over parts of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sley_testing.plans import Tables, changed

OWN = Path(__file__).parent
PLAN: dict[str, Any] = {
    "run": {"name": "powersgd", "steps": 8, "device": "cpu", "seed": 3},
    "model": {"factory": "powersgd_parts:mlp"},
    "data": {"factory": "powersgd_parts:Points"},
    "loss": {"factory": "powersgd_parts:Squares"},
    "batch": {"global_size": 4, "micro_size": 1},
    "optimizer": {"use": "core.sgd", "lr": 0.05},
}


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the plans' own modules; it is on the path, in ranks too."""
    monkeypatch.syspath_prepend(OWN)
    return OWN


@pytest.fixture
def batches(own: Path) -> Callable[..., list[dict[str, Any]]]:
    """`batches((0, 1), (2, 3))`: a batch of samples 0 and 1, and one of samples 2 and 3."""
    from powersgd_parts import batch

    return lambda *numbers: [batch(*each) for each in numbers]


@pytest.fixture
def small(own: Path) -> Callable[..., Tables]:
    """`small({"rank": 1}, table__key=value, ...)`: the small plan with these options of the reducer, or another reducer, and
    these changes.
    """

    def small(reducer: Tables | None = None, **changes: Any) -> Tables:
        return changed(PLAN, gradient_handlers=[{"use": "powersgd.reducer"} | (reducer or {})], **changes)

    return small

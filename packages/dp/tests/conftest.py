"""A small plan with the tests' model and data, for all tests of `dp`."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sley_testing.contract import SQUARES
from sley_testing.plans import Tables, changed

OWN = Path(__file__).parent / "own"
sys.path.insert(0, str(OWN))
PLAN: dict[str, Any] = {
    "run": {"name": "dp", "steps": 8, "device": "cpu", "seed": 3},
    "model": {"factory": "dp_parts:mlp"},
    "data": {"factory": "dp_parts:Points"},
    "loss": SQUARES,
    "batch": {"global_size": 4, "micro_size": 1},
    "optimizer": {"use": "core.sgd", "lr": 0.05},
    "gradient_handlers": [{"use": "dp.bucketed", "bucket_mb": 0.001}],
}


@pytest.fixture
def own() -> Path:
    """The folder of the plans' modules, which is on the path of all ranks."""
    return OWN


@pytest.fixture
def small(own: Path) -> Callable[..., Tables]:
    """`small(table__key=value, ...)` returns the tables of the small plan with these changes. None removes a key.

    handler: the table of the reducer or, if it names none, changes to the table of `dp.bucketed`.
    """

    def small(handler: Tables | None = None, **changes: Any) -> Tables:
        handler = handler or {}
        reducer = handler if "use" in handler else PLAN["gradient_handlers"][0] | handler
        return changed(PLAN, **{"gradient_handlers": [reducer], **changes})

    return small

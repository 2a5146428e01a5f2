"""What the tests of `memory` share: small plans, and how a policy is compared with `core.keep`."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sley_testing.plans import Tables, changed, small_plan
from sley_testing.runs import assert_same_run, record, record_reference

OWN = Path(__file__).parent / "own"
sys.path.insert(0, str(OWN))

PLAN = small_plan(evaluation={"every": 2, "steps": 1})


@pytest.fixture(autouse=True)
def nothing_of_before() -> None:
    """What other tests and imports left is not looked through, for leaks or for garbage: it cannot hold what a run makes.

    That is some 200,000 objects, and these tests look for garbage more often than others.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def own() -> Path:
    """The folder of the plans' own modules; it is on the path, in ranks too."""
    return OWN


@pytest.fixture
def as_kept(own: Path, texts: Path) -> Callable[..., dict[str, float]]:
    """`as_kept({"use": "memory.host"}, **changes)`: steps with a policy equal those with `core.keep`; returns its counts."""

    def as_kept(policy: Tables, num_steps: int = 3, **changes: Any) -> dict[str, float]:
        counted: list[dict[str, float]] = []
        tables = changed(PLAN, **changes)
        reference = record_reference(changed(tables, activations={"use": "core.keep"}), num_steps, folder=texts)

        def watch(run: Any) -> None:
            run.listeners.append(lambda row: counted.append(run.counts[policy["use"]]))

        assert_same_run(reference, record(changed(tables, activations=policy), num_steps, folder=texts, prepare=watch))
        return counted[-1]

    return as_kept

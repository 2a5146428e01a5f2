"""Small plans for the tests of `memory`, and the comparison of a policy with `core.keep`."""

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

PLAN = small_plan(batch__global_size=4, evaluation={"every": 2, "steps": 1})


@pytest.fixture(autouse=True)
def freeze_earlier_objects() -> None:
    """Excludes the objects of earlier tests and imports from garbage collections and leak searches.

    There are some 200,000 of them, and these tests collect garbage more often than others.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def own() -> Path:
    """The folder of the plans' modules, which is on the path of all ranks."""
    return OWN


@pytest.fixture
def compare_with_keep(own: Path, texts: Path) -> Callable[..., dict[str, float]]:
    """`compare_with_keep(policy, **changes)` asserts that steps with a policy equal those with `core.keep`, and returns the
    policy's counts.
    """

    def compare_with_keep(policy: Tables, num_steps: int = 2, **changes: Any) -> dict[str, float]:
        counted: list[dict[str, float]] = []
        tables = changed(PLAN, **changes)
        reference = record_reference(changed(tables, activations={"use": "core.keep"}), num_steps, folder=texts)

        def watch(run: Any) -> None:
            run.listeners.append(lambda row: counted.append(run.counts[policy["use"]]))

        assert_same_run(reference, record(changed(tables, activations=policy), num_steps, folder=texts, prepare=watch))
        return counted[-1]

    return compare_with_keep

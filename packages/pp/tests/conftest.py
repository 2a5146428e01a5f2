"""A small plan with the tests' model and data, and its comparison with the one-process run."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sley_testing.plans import Tables, changed, small_plan
from sley_testing.ranks import Ranks
from sley_testing.runs import RunRecord, assert_parity_of_parts, record, record_reference
from sley_trainer.run import Run

OWN = Path(__file__).parent / "own"
sys.path.insert(0, str(OWN))
PLAN = small_plan(run__seed=3, model={"factory": "pp_parts:chain"}, data={"factory": "pp_parts:Rows"}, optimizer__lr=1e-2)


@pytest.fixture
def own() -> Path:
    """The folder of the plans' modules, which is on the path of all ranks."""
    return OWN


@pytest.fixture
def small(own: Path) -> Callable[..., Tables]:
    """`small("pp.gpipe", 2, table__key=value)` returns the small plan, with stages if it names a schedule."""

    def small(schedule: str | None = None, pp: int = 1, dp: int = 1, **changes: Any) -> Tables:
        tables = changed(PLAN, **changes)
        if schedule:
            tables |= {"pipeline": {"use": schedule}, "parallel": {"pp": pp, "dp": dp}}
        return tables

    return small


def record_plans(plans: Sequence[Tables], num_steps: int, folder: Path, batches: Any, prepare: Any) -> list[RunRecord]:
    """Records all plans in the same ranks, since starting ranks takes longer than a small run."""
    return [record(tables, num_steps, folder=folder, batches=batches, prepare=prepare) for tables in plans]


@pytest.fixture
def compare_with_one_process(ranks: Callable[..., Ranks], own: Path) -> Callable[..., list[list[RunRecord]]]:
    """`compare_with_one_process(size, plans)` asserts that `size` ranks equal one process, and returns all records.

    Compares loss, norm, gradients, last weights, and the bits of the first weights, and checks that every parameter is on a
    rank. prepare: called with the run of every rank, but not with the one-process run.
    """

    def compare_with_one_process(
        size: int,
        plans: Sequence[Tables],
        num_steps: int = 2,
        folder: Path = own,
        batches: Any = None,
        prepare: Callable[[Run], None] | None = None,
    ) -> list[list[RunRecord]]:
        by_rank = ranks(size, 120)(record_plans, plans, num_steps, folder, batches, prepare)
        by_plan = [list(layouts) for layouts in zip(*by_rank, strict=True)]
        known: dict[str, RunRecord] = {}
        for tables, layouts in zip(plans, by_plan, strict=True):
            parts = ("pipeline", "parallel", "partition", "gradient_handlers")
            same = {key: value for key, value in tables.items() if key not in parts}
            if batches is None:
                reference = record_reference(same, num_steps, folder=folder)
            else:
                if str(same) not in known:
                    known[str(same)] = record(same, num_steps, folder=folder, batches=batches)
                reference = known[str(same)]
            assert_parity_of_parts(reference, layouts, tables["precision"]["compute"])
        return by_plan

    return compare_with_one_process

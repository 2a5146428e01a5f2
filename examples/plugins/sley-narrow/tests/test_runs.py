"""Tests runs with `narrow.reducer`: parity with one process, the collectives of two ranks, and one rank without peers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_testing.collectives import Collective, assert_same_sequence, collectives
from sley_testing.parity import assert_close_gradients
from sley_testing.plans import small_plan
from sley_testing.runs import assert_parity, record
from sley_trainer.assemble import assemble


def two_rank_plan(min_numel: int) -> dict[str, Any]:
    """Returns the small plan on two ranks. Gradients of fewer than `min_numel` elements are not rounded."""
    return small_plan(parallel={"dp": 2}, gradient_handlers=[{"use": "narrow.reducer", "min_numel": min_numel}])


def test_two_ranks_match_one_process(ranks: Callable[..., Any], texts: Path) -> None:
    """Compares all results without rounding; with rounding, only gradients, within the record's tolerance."""
    reference = record(small_plan(), 3, folder=texts)
    assert_parity(reference, ranks(2)(record, two_rank_plan(10**9), 3, folder=texts), "fp64")
    for rounded in ranks(2)(record, two_rank_plan(0), 1, folder=texts):
        assert_close_gradients(reference.gradients[0], rounded.gradients[0], 2**-6)


def second_step_collectives(tables: dict[str, Any], folder: Path) -> list[Collective]:
    """Returns the collectives of the second step over the group of the gradients."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        run.step()  # also compares the initial weights of ranks
        with collectives() as calls:
            run.step()
    return [call for call in calls if call.group.startswith("stage")]


def test_ranks_issue_same_bfloat16_collectives(ranks: Callable[..., Any], texts: Path) -> None:
    by_rank = ranks(2)(second_step_collectives, two_rank_plan(0), texts)
    assert_same_sequence(by_rank)
    assert {(call.op, call.dtype) for calls in by_rank for call in calls} == {("all_reduce", "bfloat16")}


def test_last_rank_of_eight_has_all_gradients(texts: Path) -> None:
    """Uses a fake world, in which groups and shapes are real but no data is exchanged."""
    plan = plan_from_dict(
        small_plan(parallel={"dp": 8}, batch__micro_size=1, gradient_handlers=[{"use": "narrow.reducer"}]), texts
    )
    with World.fake(7, 8) as world, assemble(plan, world) as run:
        assert run.groups["stage"].ranks == tuple(range(8))
        assert [param.reduce_group for param in run.registry] == ["stage"] * len(run.registry)

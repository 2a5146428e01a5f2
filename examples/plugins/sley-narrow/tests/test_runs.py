"""Runs with `narrow.reducer`: the numbers of one process, what two ranks send, and one rank without the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.plan.load import plan_from_dict
from sley_testing.collectives import Collective, assert_same_sequence, collectives
from sley_testing.parity import assert_close_gradients
from sley_testing.plans import small_plan
from sley_testing.runs import assert_parity, record


def two_ranks(min_numel: int) -> dict[str, Any]:
    """The small plan on two ranks; gradients of fewer than `min_numel` elements travel as they are."""
    return small_plan(parallel={"dp": 2}, gradient_handlers=[{"use": "narrow.reducer", "min_numel": min_numel}])


def test_two_ranks_give_the_numbers_of_one_process(ranks: Callable[..., Any], texts: Path) -> None:
    """All of them where nothing is rounded; gradients within the record's tolerance where everything is."""
    reference = record(small_plan(), 3, folder=texts)
    assert_parity(reference, ranks(2)(record, two_ranks(10**9), 3, folder=texts), "fp64")
    for rounded in ranks(2)(record, two_ranks(0), 1, folder=texts):
        assert_close_gradients(reference.gradients[0], rounded.gradients[0], 2**-6)


def sent_in_a_step(tables: dict[str, Any], folder: Path) -> list[Collective]:
    """Runs on each rank, where there are no fixtures: what the second step issues over the group of the gradients."""
    with World.join("cpu") as world, assemble(plan_from_dict(tables, folder), world) as run:
        run.step()  # compares the ranks' first values too
        with collectives() as calls:
            run.step()
    return [call for call in calls if call.group.startswith("stage")]


def test_two_ranks_send_one_sequence_of_bfloat16(ranks: Callable[..., Any], texts: Path) -> None:
    by_rank = ranks(2)(sent_in_a_step, two_ranks(0), texts)
    assert_same_sequence(by_rank)
    assert {(call.op, call.dtype) for calls in by_rank for call in calls} == {("all_reduce", "bfloat16")}


def test_the_last_of_eight_ranks_has_all_gradients(texts: Path) -> None:
    """Without peers: groups and shapes are real, data does not move."""
    plan = plan_from_dict(
        small_plan(parallel={"dp": 8}, batch__micro_size=1, gradient_handlers=[{"use": "narrow.reducer"}]), texts
    )
    with World.fake(7, 8) as world, assemble(plan, world) as run:
        assert run.groups["stage"].ranks == tuple(range(8))
        assert [param.reduce_group for param in run.registry] == ["stage"] * len(run.registry)

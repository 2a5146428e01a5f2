"""What the stages of a run hold: one rank of each, since the ranks of a stage hold as much as each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sley_core.errors import PlanError
from sley_core.estimate.bytes.rank import RankBytes, rank_bytes
from sley_core.plan.check import check_plan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sley_core.plan.plan import Plan


def stage_bytes(plan: Plan, size: int) -> Iterator[RankBytes]:
    """Yields what the first rank of each stage of a world of `size` holds, in their order.

    Shards have equal sizes on all ranks, padding included; of a sharded optimizer's states the first rank has no fewer elements
    than another. Raises PlanError for all that the plan's checks find, and as `rank_bytes` does.
    """
    if problems := check_plan(plan, size):
        raise PlanError.many(problems)
    topology = plan.topology(size)
    for stage in range(topology.pp):
        yield rank_bytes(plan, stage * topology.ranks_per_stage, size)

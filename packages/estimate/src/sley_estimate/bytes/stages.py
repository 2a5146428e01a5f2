"""Finds what the stages of a run hold: of one rank of each kind of stage, since the ranks of a stage hold as much as each
other.

plan ──draft──> kinds of stages ──> first of each kind: `rank_bytes`, in processes of their own where there are several
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from sley_estimate.bytes.each_rank import Look, each_rank, first_draft
from sley_estimate.bytes.ledger import StepPlace
from sley_estimate.bytes.rank import Moment, RankBytes, rank_bytes
from sley_estimate.bytes.stage_kinds import stage_kinds

if TYPE_CHECKING:
    from sley_core.assemble import Draft
    from sley_core.engine.stage import Stage
    from sley_core.plan.plan import Plan
    from sley_core.topology import Topology
    from sley_estimate.bytes.recipes import Recipes

Found = TypeVar("Found")


def stage_bytes(plan: Plan, size: int, cores: int = 1, draft: Draft | None = None) -> Iterator[RankBytes]:
    """Yields what the first rank of each stage of a world of `size` holds, in their order.

    Shards have equal sizes on all ranks, padding included; of a sharded optimizer's states the first rank has no fewer elements
    than another. cores: how many processes may work at a time. draft: of a rank of that world, which is not used up; left out,
    it is made as `first_draft` does, which checks the plan. Raises as that does, and as `rank_bytes`.
    """

    def look(rank: int, recipes: Recipes, own: Draft | None) -> tuple[RankBytes, None]:
        return rank_bytes(plan, rank, size, recipes, own), None

    for held, _ in each_stage(plan, size, cores, look, draft or first_draft(plan, size)):
        yield held


def each_stage(
    plan: Plan, size: int, cores: int, look: Look[tuple[RankBytes, Found]], draft: Draft
) -> Iterator[tuple[RankBytes, Found]]:
    """Yields what `look` finds of the first rank of each stage, in order, where stages of one kind are looked at once: bytes as
    on that stage, and the rest as it is of the first stage of its kind.
    """
    topology = plan.topology(size)
    kinds = stage_kinds(plan, topology, draft)
    firsts = {kind: kinds.index(kind) for kind in reversed(kinds)}
    ranks = {kind: number * topology.ranks_per_stage for kind, number in sorted(firsts.items(), key=lambda one: one[1])}
    found = each_rank(plan, list(ranks.values()), cores, look, draft)
    known: dict[Hashable, tuple[RankBytes, Found]] = dict(zip(ranks, found, strict=True))
    for number, kind in enumerate(kinds):
        held, more = known[kind]
        yield _as_on(held, draft.stage.at(number), topology), more


def _as_on(one: RankBytes, stage: Stage, topology: Topology) -> RankBytes:
    """Returns what the first rank of `stage` holds, given what that of a stage of the same kind does: the same bytes, with this
    stage's number, rank, entries and layers in the words.
    """
    number, same = stage.lists.stage, stage.at(one.stage)
    layers = {here.name: there.name for here, there in zip(same.layers, stage.layers, strict=True)}
    lists = (same.lists.training(one.num_micros), stage.lists.training(one.num_micros))
    entries = {str(here): str(there) for here, there in zip(*lists, strict=True)}
    step, entry, layer = one.place
    return replace(
        one,
        stage=number,
        rank=number * topology.ranks_per_stage,
        place=StepPlace(step, entries.get(entry, entry), layers.get(layer, layer)),
        cycles=one.cycles and replace(one.cycles, layer=layers.get(one.cycles.layer, one.cycles.layer)),
        curve=[Moment(entries.get(moment.entry, moment.entry), moment.num_bytes) for moment in one.curve],
    )

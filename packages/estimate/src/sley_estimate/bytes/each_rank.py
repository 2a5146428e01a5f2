"""Looks at several ranks of a world that is not there: in processes of their own where that works, else one after the other.

draft ──fork──> a rank, what operations made on it ──┐
      ──fork──> another, which knows these already   ┴──> what was found, in order
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from sley_core.assemble import draft_of
from sley_core.comm.world import World
from sley_core.errors import PlanError
from sley_core.plan.check import check_plan
from sley_estimate.bytes.fake_tensors import FakeTensors
from sley_estimate.bytes.forks import can_fork, forked
from sley_estimate.bytes.ledger import Ledger, StepPlace
from sley_estimate.bytes.recipes import Recipes

if TYPE_CHECKING:
    from sley_core.assemble import Draft
    from sley_core.plan.plan import Plan

T = TypeVar("T")

FEW = 2
"""Ranks that are looked at in this process: others take seconds to be worth it."""


Look = Callable[[int, Recipes, "Draft | None"], T]
"""Finds something of a rank, given what operations made on others, and in a forked process the draft, which a run uses up."""


def first_draft(plan: Plan, size: int) -> Draft:
    """Returns the draft that the first of `size` ranks makes. Raises PlanError for all that the plan's checks find, and as
    `draft_of` does.
    """
    if problems := check_plan(plan, size):
        raise PlanError.many(problems)
    with World.fake(0, size) as world:
        return draft_of(plan, world)


def each_rank(plan: Plan, ranks: Sequence[int], cores: int, look: Look[T], draft: Draft) -> list[T]:
    """Returns what `look` finds of each of `ranks`, in their order.

    cores: how many processes may work at a time. draft: which forked processes inherit, and this one keeps. Results of `look`
    cross by pickle. Raises as `look` and `forked` do.
    """
    recipes = Recipes()
    if min(len(ranks), cores + 1) <= FEW or not can_fork():
        return [look(rank, recipes, None) for rank in ranks]
    FakeTensors(Ledger(lambda: StepPlace(0, "", "")))  # the first one imports much of torch: once for all

    def told(rank: int) -> tuple[T, Recipes]:
        return look(rank, recipes, draft), recipes

    found: dict[int, T] = {}
    calls = [partial(told, rank) for rank in ranks]
    for number, (one, learned) in forked(calls, cores, plan.limits.estimate_timeout_s):
        recipes.learn(learned)
        found[number] = one
    return [found[number] for number in range(len(ranks))]

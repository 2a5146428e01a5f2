"""Tests what every stage link must pass; the tests of a plugin inherit them.

    class TestMine(StageLinkContract):
        link = {"use": "mine.link"}

Each rank is a stage, on which known messages stand in for layers (`link_walks`): random lists of actions, several chunks per
stage, neighbours in either direction and on the same stage; messages of several dtypes, with an empty tensor, one that occurs
twice, two that overlap in memory, and gradients for some, for others or for none.

Since core 0.1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, ClassVar

import pytest

from sley_core.actions.action import Placement, Transfer, forward_only
from sley_core.actions.lower import lower
from sley_core.errors import RunError
from sley_testing.link_walks import WAIT_S, Walker, linked
from sley_testing.lists import any_lists
from sley_testing.ranks import Ranks

Table = dict[str, Any]

ROUTES = {
    "two stages": (0, 1),
    "a V": (0, 1, 1, 0),
    "a wave": (0, 1, 1, 0, 0, 1, 1, 0),
    "three stages, in no order": (2, 0, 1, 1, 0, 2),
}
"""Of each placement that is walked over: the stage of each position."""


def observe(link: Table, route: tuple[int, ...], walks: Sequence[Sequence[int]], keeps: bool, seed: int) -> None:
    """Walks on this rank, once per tuple of lengths of `walks`; the forwards alone of each second one are walked again.

    Raises AssertionError where another message comes than was sent, and where one that is kept (`keeps`) changes.
    """
    placement = Placement(route)
    with linked(link) as (made, stage):
        walker = Walker(made, placement, stage, keeps=keeps)
        for number, lengths in enumerate(walks):
            lists = any_lists(placement, len(lengths), Random(seed + number))
            walker.walk(lists, lengths)
            if number % 2:
                walker.walk([forward_only(actions) for actions in lists], lengths, training=False)
            walker.check_kept()


def differ(link: Table, route: tuple[int, ...], by_stage: Sequence[Sequence[int]]) -> str:
    """Walks over the link with other lengths on each stage; returns the code of the error with which that ends, "" if it does
    not.
    """
    placement = Placement(route)
    with linked(link) as (made, stage):
        try:
            lengths = by_stage[stage]
            Walker(made, placement, stage).walk(any_lists(placement, len(lengths), Random(1)), lengths)
        except RunError as error:
            return error.diagnostics[0].code
    return ""


def abandon(link: Table) -> float:
    """Begins two walks on the first stage, which no other stage begins, and aborts each; returns the seconds that it took."""
    placement = Placement((0, 1, 1, 0))
    steps = lower(any_lists(placement, 2, Random(1)), placement, 2)[0]
    with linked(link) as (made, stage):
        began = time.monotonic()
        for _ in range(2 if stage == 0 else 0):
            made.begin([("tokens", (2, 3))] * 2, [1])
            for step in steps:
                if isinstance(step, Transfer) and step.op == "post":
                    made.post(step, ("tokens", (2, 3)))
            made.abort("the contract's failing step")
        return time.monotonic() - began


class StageLinkContract:
    """Tests a stage link: inherit, set `link` to its table, and pytest does the rest. num_walks: over each placement."""

    link: ClassVar[Table]
    num_walks: ClassVar[int] = 4

    @pytest.mark.parametrize("name", ROUTES)
    def test_what_is_sent_comes_as_it_was(self, ranks: Callable[..., Ranks], name: str) -> None:
        """In the order of whoever takes it, also where what was sent is overwritten at once."""
        route = ROUTES[name]
        ranks(max(route) + 1)(observe, self.link, route, [(3, 3, 3, 3)] * self.num_walks, False, len(route))

    @pytest.mark.parametrize("name", ["two stages", "a wave"])
    def test_micro_batches_may_have_any_lengths(self, ranks: Callable[..., Ranks], name: str) -> None:
        """In one walk, and from one to the next."""
        ranks(2)(observe, self.link, ROUTES[name], [(3, 5, 1, 3), (5,), (1, 1, 8), (3, 5, 1, 3)], False, 3)

    @pytest.mark.parametrize("name", ["two stages", "a wave"])
    def test_what_is_taken_stays_while_anything_has_it(self, ranks: Callable[..., Ranks], name: str) -> None:
        """The tensor, a view or an array of it, over all walks; a write to one tensor changes no other."""
        ranks(2)(observe, self.link, ROUTES[name], [(3, 3, 3, 3)] * 3 + [(5, 2)], True, 5)

    @pytest.mark.parametrize(
        "by_stage",
        [((3, 3), (3, 3, 3)), ((3, 3), (3, 4)), ((3, 4), (4, 3))],
        ids=["another number", "other shapes", "another order"],
    )
    def test_a_stage_on_another_walk_is_told_on_both_ends(
        self, ranks: Callable[..., Ranks], by_stage: Sequence[Sequence[int]]
    ) -> None:
        """By RunError "stages-differ", long before anybody's patience is at its end."""
        began = time.monotonic()
        assert ranks(2)(differ, self.link, ROUTES["two stages"], by_stage) == ["stages-differ"] * 2
        assert time.monotonic() - began < WAIT_S

    def test_an_abort_waits_for_nobody(self, ranks: Callable[..., Ranks]) -> None:
        """The stage's neighbours may never come: it forgets the walk, may begin another, and its process may end."""
        assert max(ranks(2)(abandon, self.link)) < WAIT_S / 2

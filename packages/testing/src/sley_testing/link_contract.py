"""Tests what every stage link must pass; the tests of a plugin inherit them.

    class TestMine(StageLinkContract):
        link = {"use": "mine.link"}

Each rank is a stage, on which known messages stand in for layers (`link_walks`): random lists of actions, several chunks per
stage, neighbours in either direction and on the same stage; messages of several dtypes, with an empty tensor, one that occurs
twice, two that overlap in memory, and gradients for some, for others or for none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from sley_core.actions.action import SENDS_GRADIENT, Action, Flow, Kind, Placement, Transfer, forward_only
from sley_core.actions.lower import lower
from sley_core.assemble import make_parts
from sley_core.comm.world import World
from sley_core.engine.boundary import Description, Leaf
from sley_core.engine.execute import Crossing
from sley_core.engine.registry import ParameterRegistry
from sley_core.errors import RunError
from sley_core.plan.load import plan_from_dict
from sley_core.plan.loader import Loader
from sley_core.protocols import StageLink
from sley_core.topology import Topology
from sley_testing.contract import tables
from sley_testing.ranks import Ranks
from sley_testing.runs import any_lists

Table = dict[str, Any]

ROUTES = {
    "two stages": (0, 1),
    "a V": (0, 1, 1, 0),
    "a wave": (0, 1, 1, 0, 0, 1, 1, 0),
    "three stages, in no order": (2, 0, 1, 1, 0, 2),
}
"""Of each placement that is walked over: the stage of each position."""


def observe(link: Table, route: tuple[int, ...], walks: Sequence[Sequence[int]], keeps: bool, seed: int) -> None:
    """Walks on this rank, once per tuple of lengths of `walks`; the forwards alone of each second one are walked again. Raises
    AssertionError where another message comes than was sent, and where one that is kept (`keeps`) changes.
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
    """Walks with other lengths on each stage; returns the code of the error that ends it, or ""."""
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
    def test_received_tensors_equal_sent(self, ranks: Callable[..., Ranks], name: str) -> None:
        """In the order of whoever takes it, also where what was sent is overwritten at once."""
        route = ROUTES[name]
        ranks(max(route) + 1)(observe, self.link, route, [(3, 3, 3, 3)] * self.num_walks, False, len(route))

    @pytest.mark.parametrize("name", ["two stages", "a wave"])
    def test_micro_batches_of_different_lengths(self, ranks: Callable[..., Ranks], name: str) -> None:
        """In one walk, and from one to the next."""
        ranks(2)(observe, self.link, ROUTES[name], [(3, 5, 1, 3), (5,), (1, 1, 8), (3, 5, 1, 3)], False, 3)

    @pytest.mark.parametrize("name", ["two stages", "a wave"])
    def test_received_tensors_stay_unchanged_while_referenced(self, ranks: Callable[..., Ranks], name: str) -> None:
        """The tensor, a view or an array of it, over all walks; a write to one tensor changes no other."""
        ranks(2)(observe, self.link, ROUTES[name], [(3, 3, 3, 3)] * 3 + [(5, 2)], True, 5)

    @pytest.mark.parametrize(
        "by_stage",
        [((3, 3), (3, 3, 3)), ((3, 3), (3, 4)), ((3, 4), (4, 3))],
        ids=["another number", "other shapes", "another order"],
    )
    def test_differing_walks_are_reported_on_both_stages(
        self, ranks: Callable[..., Ranks], by_stage: Sequence[Sequence[int]]
    ) -> None:
        """By RunError "stages-differ", long before anybody's patience is at its end."""
        began = time.monotonic()
        assert ranks(2)(differ, self.link, ROUTES["two stages"], by_stage) == ["stages-differ"] * 2
        assert time.monotonic() - began < WAIT_S

    def test_abort_does_not_wait(self, ranks: Callable[..., Ranks]) -> None:
        """The stage's neighbours may never come: it forgets the walk, may begin another, and its process may end."""
        assert max(ranks(2)(abandon, self.link)) < WAIT_S / 2


WAIT_S = 10.0  # how long a collective of these walks waits for another rank


@contextmanager
def linked(table: dict[str, Any]) -> Iterator[tuple[StageLink, int]]:
    """Yields the link with this `[link]`, prepared, and this rank's stage, in a world of one rank per stage."""
    loader = Loader()
    record = loader.record("stage_links", table["use"])
    config = record.config.model_validate({key: value for key, value in table.items() if key != "use"})
    link: StageLink = loader.load(table["use"].partition(".")[0]).load_builder(record)(config)
    plan = plan_from_dict(tables([], 1))  # for its tables alone
    with World.join("cpu", timeout_s=WAIT_S) as world:
        topology = Topology.of(world.size, pp=world.size)
        groups, registry = world.groups(topology, WAIT_S), ParameterRegistry([[]])
        link.prepare(make_parts(plan, world, topology, groups, (), registry))
        yield link, groups["pp"].coord


class Walker:
    """One stage's walks over `link`. keeps: whether it keeps all that it takes, and writes to some of it: `check_kept` says
    whether all is as it was left.
    """

    def __init__(self, link: StageLink, placement: Placement, stage: int, *, keeps: bool = False) -> None:
        self.placement = placement
        self.stage = stage
        self.keeps = keeps
        self._crossing = Crossing(placement, stage, link)
        self._number = 0
        self._lengths: Sequence[int] = ()
        self._given: dict[tuple[Flow, int, int], list[Tensor]] = {}
        self._received: dict[tuple[int, int], Description] = {}
        self._kept: list[tuple[Any, Tensor]] = []

    def walk(self, lists: Sequence[Sequence[Action]], lengths: Sequence[int], *, training: bool = True) -> None:
        """Walks through this stage's list. lengths: of each micro-batch, on which the shapes of its messages depend. Raises
        AssertionError where another message comes than was sent.
        """
        self._number += 1
        self._lengths = lengths
        steps = lower(lists, self.placement, len(lengths), training=training)[self.stage]
        self._crossing.begin([("tokens", (2, length)) for length in lengths])
        for step in steps:
            if isinstance(step, Transfer):
                self._crossing.transfer(step)
                if step.op == "send":
                    # A sent output's memory is used for something else at once.
                    for tensor in self._given.pop((step.flow, step.chunk, step.micro)):
                        tensor.fill_(77)
            elif step.kind is Kind.FORWARD:
                self._forward(step)
            elif step.kind in SENDS_GRADIENT:
                self._backward(step)
        self._crossing.end()
        self._given.clear()

    def check_kept(self) -> None:
        """Raises AssertionError where something that was kept has changed."""
        for kept, wanted in self._kept:
            found = torch.from_numpy(kept) if isinstance(kept, np.ndarray) else kept
            assert torch.equal(found, wanted), f"what was taken and kept became {found}: it was {wanted}"

    def _forward(self, action: Action) -> None:
        """Takes the input of a forward over the link, if there is one, and gives its output."""
        position, micro = self.placement.position(self.stage, action.chunk), action.micro
        if position > 0:
            self._received[action.chunk, micro] = self._take("forward", action, position - 1)
        if position + 1 < self.placement.num_positions:
            self._give("forward", action, *self._output(position, micro))

    def _backward(self, action: Action) -> None:
        """Takes the gradients of a backward over the link, if there are any, and gives the input's."""
        position, micro = self.placement.position(self.stage, action.chunk), action.micro
        if position + 1 < self.placement.num_positions:
            self._take("backward", action, position + 1)
        if position > 0:
            description = self._received.pop((action.chunk, micro)).gradients
            self._give("backward", action, description, self._gradients(position, micro, description))

    def _take(self, flow: Flow, action: Action, origin: int) -> Description:
        """Takes what the chunk at position `origin` gave, and looks whether it is that."""
        description, tensors = self._crossing.bring(flow, action.chunk, action.micro)
        is_sent = self.placement.holder(origin).stage != self.stage
        where = f"stage {self.stage}, walk {self._number}, {flow} of {action}"
        if flow == "forward":
            due, wanted = self._output(origin, action.micro)
            due = due.with_overlaps(wanted) if is_sent else due
            assert description == due, f"{where}: came {description.leaves}, not {due.leaves}"
        else:
            due = self._output(origin - 1, action.micro)[0].gradients
            wanted = self._gradients(origin, action.micro, due)
        assert len(tensors) == len(wanted), f"{where}: {len(tensors)} tensors came, not {len(wanted)}"
        for at, (found, sent) in enumerate(zip(tensors, wanted, strict=True)):
            assert torch.equal(found, sent), f"{where}: tensor {at} came as {found}, not {sent}"
        if self.keeps and is_sent:
            self._keep(tensors, wanted, action.micro)
        return description

    def _give(self, flow: Flow, action: Action, description: Description, tensors: list[Tensor]) -> None:
        self._given[flow, action.chunk, action.micro] = tensors
        self._crossing.give(flow, action.chunk, action.micro, (description, tensors))

    def _keep(self, tensors: list[Tensor], wanted: list[Tensor], micro: int) -> None:
        """Keeps each tensor in one of the ways in which a layer may: itself, a view, an array. Writes to the first of some."""
        versions = [tensor._version for tensor in tensors[1:]]
        if tensors and micro % 2:
            tensors[0].fill_(7)
            wanted = [torch.full_like(wanted[0], 7), *wanted[1:]]
        assert versions == [tensor._version for tensor in tensors[1:]], "a write to one tensor counts as one to another"
        self._kept += [
            ((tensor, tensor.view_as(tensor), tensor.numpy())[(at + micro) % 3], value.clone())
            for at, (tensor, value) in enumerate(zip(tensors, wanted, strict=True))
        ]

    def _output(self, position: int, micro: int) -> tuple[Description, list[Tensor]]:
        """Returns what the chunk at `position` gives: several dtypes, an empty tensor, one twice, two that overlap."""
        chance, length = self._chance(position, micro, 0), self._lengths[micro]
        hidden = torch.randn(length + 2, 3, generator=chance)
        counts = torch.randint(0, 99, (2,), generator=chance)
        scalar = torch.randn((), generator=chance, dtype=torch.float64)
        tensors = [hidden, counts, scalar, torch.empty(0, length), hidden[1:3], counts]
        gradients = [micro % 3 != 2, False, micro % 2 == 0, False, False, False]
        leaves = [Leaf(each.dtype, tuple(each.shape), has) for each, has in zip(tensors, gradients, strict=True)]
        leaves[5] = Leaf(counts.dtype, (2,), has_gradient=False, same_as=1)
        return Description(tuple(leaves), {"tuple": list(range(6))}), tensors

    def _gradients(self, position: int, micro: int, description: Description) -> list[Tensor]:
        """Returns the gradients that the chunk at `position` gives back for what it took."""
        chance = self._chance(position, micro, 1)
        return [torch.randn(leaf.shape, generator=chance, dtype=leaf.dtype) for leaf in description.leaves]

    def _chance(self, position: int, micro: int, lane: int) -> torch.Generator:
        return torch.Generator().manual_seed(((self._number * 64 + position) * 64 + micro) * 2 + lane)

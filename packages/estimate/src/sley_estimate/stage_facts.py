"""Asks a run in a fake world what the ranks of each stage exchange of gradients, and update; once for alike stages."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sley_core.assemble import assemble
from sley_core.comm.world import World
from sley_core.draft import DTYPES, dtypes
from sley_core.errors import PlanError
from sley_core.optim.shared import in_training, skips_on_device
from sley_core.records import steps_on_host
from sley_core.topology import TIE
from sley_estimate.seconds.groups import groups_at_once, slowest
from sley_estimate.seconds.step import GradientExchange, Use

if TYPE_CHECKING:
    from sley_core.engine.parts import Parts
    from sley_core.engine.stage import Stage
    from sley_core.engine.stepper import Stepper
    from sley_core.plan.plan import Plan
    from sley_core.protocols import HandlerExchange
    from sley_core.run import Run
    from sley_core.topology import Topology
    from sley_estimate.layers.of_plan import PricedLayer
    from sley_estimate.layers.operators import Operator
    from sley_estimate.machine.tables import LinksTable


class UntoldError(Exception):
    """A handler does not tell what it exchanges."""


@dataclass(frozen=True)
class ToldExchange:
    """Holds what a handler said, for the ranks of any stage like the one that was asked.

    one: what it said, without its entries. handler: its number among the stage's. uses: the layers of the stage whose weights
    it is about. ranks: of its group, counted from the first rank of the stage. tie: None, or the tied parameter's name and the
    stages that have it.
    """

    one: HandlerExchange
    handler: int
    uses: tuple[Use, ...]
    ranks: tuple[int, ...]
    tie: tuple[str, tuple[int, ...]] | None

    def on(self, stage: int, topology: Topology, links: LinksTable) -> GradientExchange:
        """Returns the exchange on `stage`, with its cost over `links` in the slowest of the stage's groups. Raises as
        `collective`.
        """
        one, first_rank = self.one, stage * topology.ranks_per_stage
        groups = groups_at_once(topology, one.axis, [first_rank + rank for rank in self.ranks], links)
        cost = slowest(one.kind, one.num_bytes, groups, links)
        if self.tie is not None:
            name, stages = self.tie
            key: Hashable = one.axis, name
            return GradientExchange(cost, one.starts, self.uses, self.handler, f"{one.kind} {one.axis}", stages, key)
        return GradientExchange(cost, one.starts, self.uses, self.handler, f"{one.kind} {one.axis}")


@dataclass(frozen=True)
class StageFacts:
    """Holds what the ranks of one stage exchange, in the order of handlers, and the bytes that norm and
    update move on a rank.
    """

    exchanges: tuple[ToldExchange, ...]
    update_bytes: int


class FactsOfRun:
    """Finds the facts of the stage whose fake run takes steps for its bytes. found: None where a handler does not tell.

    count: tensors like the weight that the optimizer keeps.
    """

    found: StageFacts | None

    def __init__(self, plan: Plan, count: int) -> None:
        self._plan = plan
        self._count = count

    def follow(self, run: Run, tensors: object) -> None:
        """Asks `run`, which has taken no step yet."""
        try:
            self.found = _facts_of(self._plan, run, self._count)
        except UntoldError:
            self.found = None

    def begin(self) -> None:
        """Does nothing: all is known."""

    def end(self) -> None:
        """Does nothing."""

    def note(self, operator: Operator) -> None:
        """Does nothing."""


def stage_facts(plan: Plan, topology: Topology, stage: Stage, layers: Sequence[PricedLayer]) -> list[StageFacts]:
    """Returns what the ranks of each stage exchange and update, in the order of stages. Stages with layers of the same keys,
    and no tie, are alike, and one of them is assembled in a fake world.

    stage: of any rank. layers: of the whole model, in order. Raises UntoldError for a handler that does not tell what it
    exchanges, PlanError "estimate-seconds" for an optimizer that cannot be tried, and all that `assemble` raises.
    """
    keys = {layer.name: layer.key for layer in layers}
    tied = {number for stages in stage.ties for number in stages}
    count = num_states(plan)
    known: dict[Hashable, StageFacts] = {}
    found = []
    for number in range(topology.pp):
        held = tuple(tuple(keys[layer.name] for layer in part) for owner, part in stage.stages if owner == number)
        kind = held, number if number in tied else None
        if kind not in known:
            known[kind] = _facts(plan, topology, number, count)
        found.append(known[kind])
    return found


def _facts(plan: Plan, topology: Topology, number: int, count: int) -> StageFacts:
    """Returns the facts of stage `number`, from its first rank, which is assembled in a fake world. Exchanges of one rank with
    itself are left out. count: tensors like the weight that the optimizer keeps.
    """
    first = number * topology.ranks_per_stage
    with World.fake(first, topology.world) as world, assemble(plan, world) as run:
        return _facts_of(plan, run, count)


def _facts_of(plan: Plan, run: Run, count: int) -> StageFacts:
    """Returns the facts of the stage of `run`, which has taken no step yet. count: as `_facts` takes it."""
    told = tuple(
        _told(run.parts, run.stepper, one, at)
        for at, handler in enumerate(run.stepper.handlers)
        for one in _asked(handler.exchanges())
        if run.groups[one.axis].size > 1
    )
    return StageFacts(told, _update_bytes(plan, run.parts, count))


def _asked(exchanges: Sequence[HandlerExchange] | None) -> Sequence[HandlerExchange]:
    """Returns what a handler tells. Raises UntoldError for None: it does not tell."""
    if exchanges is None:
        raise UntoldError
    return exchanges


def _told(parts: Parts, stepper: Stepper, one: HandlerExchange, handler: int) -> ToldExchange:
    """Returns an exchange that a handler tells, with layers as chunk and number in it, and ranks counted from the rank that was
    asked. handler: the number of the handler on its stage.
    """
    places = {
        layer.name: (chunk, at)
        for chunk, layers in enumerate(stepper.executor.chunks)
        for at, layer in enumerate(layers)
    }
    uses = tuple(sorted({places[name] for entry in one.entries for name in entry.layers}))
    ranks = parts.groups[one.axis].ranks
    tie = None
    if one.axis.startswith(TIE):
        tie = one.entries[0].name, tuple(sorted(parts.topology.coordinates(rank).stage for rank in ranks))
    alone = replace(one, entries=())  # which would hold the run
    return ToldExchange(alone, handler, uses, tuple(rank - parts.world.rank for rank in ranks), tie)


def _update_bytes(plan: Plan, parts: Parts, count: int) -> int:
    """Returns the bytes that norm and update move on the rank: of the elements that it steps itself. count:
    states per weight.
    """
    # Not of `store.part`: a gradient that nobody reduces is an empty view before the first step.
    spans = [(entry, parts.store.span(entry)) for entry in parts.book.trainable]
    return moved_by_update(plan, count) * sum(entry.numel if span is None else span.numel for entry, span in spans)


def moved_by_update(plan: Plan, count: int) -> int:
    """Returns the bytes that norm, clipping and update move for each element that a rank steps: the gradient for the norm and
    for the update, there and back where it is clipped; weight and states there and back; a working copy, if there is one.

    count: how many tensors like the weight the optimizer keeps, which `num_states` returns.
    """
    config: Any = plan.optimizer.config
    times = 2 if config.clip_norm is None else 4
    working, stepped = dtypes(plan)
    copy = working.itemsize if stepped != working else 0
    gradients = DTYPES[plan.precision.gradients]
    widened = 2 * stepped.itemsize if gradients != stepped else 0
    return times * gradients.itemsize + widened + stepped.itemsize * (2 + 2 * count) + copy


def num_states(plan: Plan) -> int:
    """Returns how many tensors of the weight's shape the plan's optimizer keeps per weight, counted after a step of one 4 x 4
    weight on the CPU.

    Raises PlanError "estimate-seconds" for an optimizer that cannot be built or stepped so.
    """
    weight = nn.Parameter(torch.zeros(4, 4))
    try:
        optimizer: Any = in_training(plan.optimizer.build([{"params": [weight]}], torch.device("cpu")))
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    except Exception as error:
        message = f"`{plan.optimizer.name}` cannot be tried on one small weight: {type(error).__name__}: {error}"
        raise PlanError("estimate-seconds", message, path=("optimizer",)) from error
    kept = (value for value in optimizer.state[weight].values() if torch.is_tensor(value))
    return sum(1 for value in kept if value.shape == weight.shape)


def waits_before_updates(plan: Plan) -> bool:
    """Returns whether the host waits for its device before each update, and the device then for that: the host steps the
    weights itself, the loss is scaled, or the optimizer cannot skip a step on the device.
    """
    if plan.precision.loss_scale is not None or any(steps_on_host(manager.record) for manager in plan.offload):
        return True
    some = [{"params": [nn.Parameter(torch.zeros(4, 4))]}]
    return not skips_on_device(plan.optimizer.build(some, torch.device("cpu")))

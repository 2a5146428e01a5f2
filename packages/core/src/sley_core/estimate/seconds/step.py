"""Programs of all stages from their lowered lists: the same lists that run, with what each action takes.

The ranks of a stage do the same at the same time, so one of them stands for all. Stages meet in the messages between them, in
sums of what several hold, and in the norm at the end of the step.

    list of a stage   post B0 > F0.0 > send F0 > ... > B0.3 > C0
    program           Begin    Compute  Begin   ...  Wait Compute Begin(reduce) ... Wait(reduce) Compute(update)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sley_core.actions.action import GRADIENT_KINDS, Action, Kind, Lowered, Transfer, direction_of
from sley_core.actions.machine import Delivery, taken
from sley_core.actions.placement import Placement
from sley_core.estimate.seconds.layer_seconds import LayerSeconds
from sley_core.estimate.seconds.links import NOTHING, Cost
from sley_core.estimate.seconds.program import Begin, Compute, Exchange, Wait, Word


@dataclass(frozen=True)
class Reduction:
    """A sum of gradients over the ranks of a stage. layer: of the chunk, after whose last backward it may start; -1 for
    one that starts when all gradients of the stage are complete.
    """

    chunk: int
    layer: int
    cost: Cost


@dataclass(frozen=True)
class StepWork:
    """What a step does, beside its lists. parts: layers of each position of the model, in order.

    messages: cost of the value between position i and i + 1, and of its gradient. reductions, update_s: of each stage.
    together: cost of what all stages sum before the update (norm, loss). after_s: seconds of every stage at the end.
    """

    parts: Sequence[Sequence[LayerSeconds]]
    messages: Sequence[Cost]
    reductions: Mapping[int, Sequence[Reduction]] = field(default_factory=dict)
    update_s: Mapping[int, float] = field(default_factory=dict)
    together: Cost = NOTHING
    after_s: float = 0.0


def programs_of(lists: Sequence[Lowered], placement: Placement, work: StepWork) -> list[list[Word]]:
    """Returns one program per stage. Pure: the same arguments give the same programs."""
    return [list(_Stage(stage, steps, placement, work, len(lists)).words()) for stage, steps in enumerate(lists)]


class _Stage:
    def __init__(self, stage: int, steps: Lowered, placement: Placement, work: StepWork, stages: int) -> None:
        self.stage = stage
        self.steps = steps
        self.placement = placement
        self.work = work
        self.stages = stages
        self.last = {step.chunk: step for step in steps if isinstance(step, Action) and step.kind in GRADIENT_KINDS}
        self.reductions = work.reductions.get(stage, ())

    def words(self) -> Iterator[Word]:
        for step in self.steps:
            if isinstance(step, Transfer):
                yield Begin(self._message(step))
            elif step.kind is not Kind.CHUNK_DONE:
                yield from self._action(step)
        late = [self._reduction(number) for number, one in enumerate(self.reductions) if one.layer < 0]
        yield from map(Begin, late)
        yield from (Wait(self._reduction(number).key) for number in range(len(self.reductions)))
        if self.stages > 1:
            everyone = Exchange("norm", "all", tuple(range(self.stages)), *self.work.together)
            yield from (Begin(everyone), Wait(everyone.key))
        rest = self.work.update_s.get(self.stage, 0.0) + self.work.after_s
        if rest:
            yield Compute(rest)

    def _action(self, action: Action) -> Iterator[Word]:
        position = self.placement.position(self.stage, action.chunk)
        needed = taken(action, position, self.placement)
        if needed is not None and self.placement.holder(needed.origin).stage != self.stage:
            yield Wait(needed)
        seconds = [layer.of(action.kind) for layer in self.work.parts[position]]
        due: dict[int, list[Begin]] = {}
        if self.last.get(action.chunk) == action:
            for number, one in enumerate(self.reductions):
                if one.chunk == action.chunk and one.layer >= 0:
                    due.setdefault(one.layer, []).append(Begin(self._reduction(number)))
        left = 0.0
        for at in reversed(range(len(seconds))):  # backward; what a forward's order is does not matter, nothing stands in it
            left += seconds[at]
            if at in due:
                yield Compute(left, action)
                yield from due[at]
                left = 0.0
        if left or not due:
            yield Compute(left, action)

    def _message(self, step: Transfer) -> Exchange:
        """The transfer, equal at both of its ends."""
        if step.op == "send":
            position, sender, receiver = self.placement.position(step.peer, step.peer_chunk), self.stage, step.peer
        else:
            position, sender, receiver = self.placement.position(self.stage, step.chunk), step.peer, self.stage
        delivery = Delivery(step.flow, position, step.micro)
        cost = self.work.messages[min(delivery.position, delivery.origin)]
        lane = f"{direction_of(sender, receiver)} {sender}>{receiver}"
        return Exchange(delivery, lane, (sender, receiver), *cost, links=(("sends", sender), ("receives", receiver)))

    def _reduction(self, number: int) -> Exchange:
        key: Hashable = ("reduce", self.stage, number)
        ports = ("sends", self.stage), ("receives", self.stage)
        return Exchange(key, "reduce", (self.stage,), *self.reductions[number].cost, links=ports)

"""The plugin `broken`: links, schedules and handlers of ties that are wrong in one way each; the rest is that of `wave`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count

import torch

from sley_core.api.actions import Action, Kind, Schedule
from sley_core.hookspecs import hookimpl
from sley_core.records import GradientHandlerRecord, ScheduleRecord, StageLinkRecord
from sley_wave.config import HanayoConfig, LinkConfig, TiesConfig
from sley_wave.link import Link
from sley_wave.ties import Ties

Lists = list[list[Action]]
LINKS = ("reusing", "disorderly", "rigid", "late", "deaf", "patient")


class Reusing(Link):
    """Receives into the memory of the walk before, whatever has that."""

    def __init__(self, config):
        super().__init__(config)
        self._memory = {}

    def _received(self, transfer):
        description, tensors = super()._received(transfer)
        places = [self._memory.setdefault((transfer, at, each.shape), each) for at, each in enumerate(tensors)]
        return description, [place.copy_(each) for place, each in zip(places, tensors, strict=True)]


class Disorderly(Link):
    """Gives out what comes first, whatever is asked for."""

    def receive(self, transfer):
        way = "up" if transfer.peer < self._stage else "down"
        return self._received(self._due[way].popleft())


class Rigid(Link):
    """Takes all messages of a boundary for ones like the first."""

    def __init__(self, config):
        super().__init__(config)
        self._known = {}

    def _received(self, transfer):
        description, tensors = super()._received(transfer)
        return self._known.setdefault((transfer.flow, transfer.chunk), description), tensors


class Late(Link):
    """Reads what it sends when it is next called, and not at once."""

    def __init__(self, config):
        super().__init__(config)
        self._late = []

    def send(self, *message):
        self._flush()
        self._late.append(message)

    def post_receive(self, transfer, key):
        self._flush()
        super().post_receive(transfer, key)

    def receive(self, transfer):
        self._flush()
        return super().receive(transfer)

    def drain(self):
        self._flush()
        super().drain()

    def _flush(self):
        while self._late:
            super().send(*self._late.pop(0))


class Deaf(Link):
    """Hears what its neighbours walk through, and does not compare."""

    def _agree(self, peer):
        if peer not in self._agreed:
            self._hear(torch.empty_like(self._word), peer)
            self._agreed.add(peer)


class Patient(Link):
    """Waits for its neighbours before it aborts."""

    def abort(self, why):
        self.drain()


def forwards_first(micros: int) -> list[Action]:
    """All forwards, then all backwards."""
    return [Action(kind, 0, micro) for kind in (Kind.FORWARD, Kind.BACKWARD) for micro in range(micros)]


def one_by_one(stages: int, chunks: int, micros: int) -> Lists:
    """Right, and slow: a microbatch goes through all stages and back before the next one begins."""
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    return [[Action(kind, 0, micro) for micro in range(micros) for kind in kinds] for _ in range(stages)]


def blocked(stages: int, chunks: int, micros: int) -> Lists:
    """The last stage wants the last microbatch first, which comes when it has finished the first one."""
    lists = one_by_one(stages, chunks, micros)
    if stages > 1:
        lists[-1] = [action for micro in reversed(range(micros)) for action in lists[-1] if action.micro == micro]
    return lists


def careless(stages: int, chunks: int, micros: int) -> Lists:
    """Of five microbatches or more the last one has a backward too few."""
    lists = one_by_one(stages, chunks, micros)
    return [actions[:-1] for actions in lists] if micros >= 5 else lists


def greedy(stages: int, chunks: int, micros: int) -> Lists:
    """Holds all microbatches, and says that it holds one."""
    return [forwards_first(micros) for _ in range(stages)]


def forgetful(calls: count[int], stages: int, chunks: int, micros: int) -> Lists:
    """Every second call writes another list."""
    return greedy(stages, chunks, micros) if next(calls) % 2 else one_by_one(stages, chunks, micros)


GENERATORS: dict[str, Callable[[int, int, int], Lists]] = {
    "one_by_one": one_by_one,
    "blocked": blocked,
    "careless": careless,
    "greedy": greedy,
    "forgetful": partial(forgetful, count()),
}


def build(name: str, config: HanayoConfig) -> Schedule:
    return Schedule(GENERATORS[name])


build_one_by_one, build_blocked, build_careless, build_greedy, build_forgetful = (partial(build, name) for name in GENERATORS)


class Twice(Ties):
    """Sums what it has summed."""

    def finish_step(self, step):
        super().finish_step(step)
        super().finish_step(step)


class Unsummed(Ties):
    """Leaves each stage its own."""

    def finish_step(self, step):
        pass


@hookimpl
def sley_records():
    beside = {"config": HanayoConfig, "link": "wave.link", "partition": "wave.even"}
    return [
        *(StageLinkRecord(name=name, config=LinkConfig, build=f"broken_parts:{name.title()}") for name in LINKS),
        *(ScheduleRecord(name=name, build=f"broken_parts:build_{name}", **beside) for name in GENERATORS),
    ]


@hookimpl
def sley_gradient_handlers():
    return [
        GradientHandlerRecord(
            name=name, config=TiesConfig, build=f"broken_parts:{name.title()}", role="tie", after=("reducer",)
        )
        for name in ("twice", "unsummed")
    ]
